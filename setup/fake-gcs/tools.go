//go:build tools

// Package tools names the program that setup/fake-gcs.sh builds, so that go.mod and go.sum say all of what it is made of.
package tools

import _ "github.com/fsouza/fake-gcs-server"
