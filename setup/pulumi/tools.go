//go:build tools

// Package tools pins the Pulumi CLI, so that go.sum covers all that goes into it.
package tools

import _ "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi"
