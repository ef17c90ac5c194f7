//go:build tools

// Package tools pins the last Python language host that is a Go package of Pulumi's SDK module.
package tools

import _ "github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python"
