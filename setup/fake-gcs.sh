#!/bin/sh
# A double of Google's storage for the tests, built from its Go module. Nothing else uses it.
set -eu
root=$(dirname "$(dirname "$(readlink -f "$0")")")
out=$root/.cache/fake-gcs
cd "$root/setup/fake-gcs"
version=$(sed -n 's|^require github.com/fsouza/fake-gcs-server ||p' go.mod)
needed=go$(sed -n 's|^go ||p' go.mod)

say() { echo "fake-gcs: $*"; }

built() { [ -x "$out/fake-gcs-server" ] && [ "$(cat "$out/version" 2>/dev/null)" = "$version" ]; }

recent_go() { command -v go >/dev/null && printf '%s\n%s\n' "$needed" "$(go env GOVERSION)" | sort -VC; }

if built; then say "$version is there"; exit 0; fi
if ! recent_go; then
  echo "fake-gcs: install Go ${needed#go} or later, which builds the tests' double of Google's storage, then try again" >&2
  exit 2
fi
say "building $version with $(go env GOVERSION): about 2 minutes, once"
mkdir -p "$out"
package=github.com/fsouza/fake-gcs-server
"$root/.venv/bin/python" "$root/setup/progress.py" fake-gcs --log "$out/build.log" --match '^([\w./-]+)$' \
  --total "$(go list -mod=readonly -deps $package | wc -l)" -- \
  go build -v -mod=readonly -buildvcs=false -trimpath -o "$out/fake-gcs-server" -ldflags "-s -w" $package
echo "$version" >"$out/version"
say "built $version"
