#!/bin/sh
# A fake of Google's storage for the tests, built from its Go module. Nothing else uses it.
set -eu
cd "$(dirname "$0")/.."
part=fake-gcs
. setup/common.sh
alone
out=$root/.cache/fake-gcs
cd setup/fake-gcs
version=$(sed -n 's|^require github.com/fsouza/fake-gcs-server ||p' go.mod)
needed=$(sed -n 's|^go ||p' go.mod)

built() { [ -x "$out/fake-gcs-server" ] && [ "$(cat "$out/version" 2>/dev/null)" = "$version" ]; }

if built; then unchanged "$version is there"; exit 0; fi
recent_go "$needed" || fail "install Go $needed or later, which builds the tests' fake of Google's storage, then try again"
find_python || python=python3
say "building $version with $(go env GOVERSION): about 2 minutes, once"
mkdir -p "$out"
package=github.com/fsouza/fake-gcs-server
progress fake-gcs --match '^([\w./-]+)$' --total "$(go list -mod=readonly -deps $package | wc -l)" -- \
  go build -v -mod=readonly -buildvcs=false -trimpath -o "$out/fake-gcs-server" -ldflags "-s -w" $package
echo "$version" >"$out/version"
finish "built $version"
