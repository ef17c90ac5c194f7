#!/bin/sh
# The Pulumi CLI: the user's own if it is new enough, else Pulumi's download, else one built from Pulumi's Go modules.
# Which one it is, is in .cache/pulumi/cli, where setup/pulumi.sh looks.
set -eu
cd "$(dirname "$0")/.."
part=pulumi
. setup/common.sh
out=$root/.cache/pulumi
version=v$least_pulumi
needed_go=1.25.11
downloads=${PULUMI_DOWNLOADS:-https://get.pulumi.com/releases/sdk}
sums=${PULUMI_SUMS:-https://github.com/pulumi/pulumi/releases/download/$version/pulumi-$least_pulumi-checksums.txt}

use() {
  mkdir -p "$out"
  echo "$1" >"$out/cli"
  say "$2"
}

made() { [ -x "$out/pulumi" ] && [ "$("$out/pulumi" version 2>/dev/null)" = "$version" ] && [ -x "$out/pulumi-resource-pulumi-python" ]; }

# Runs where `set -e` counts for nothing.
download() {
  case $(uname -s) in Linux) system=linux ;; Darwin) system=darwin ;; *) return 1 ;; esac
  case $(uname -m) in x86_64 | amd64) machine=x64 ;; aarch64 | arm64) machine=arm64 ;; *) return 1 ;; esac
  archive=pulumi-$version-$system-$machine.tar.gz
  find_python || python=python3
  mkdir -p "$out" || return 1
  say "fetching Pulumi $version"
  "$python" setup/fetch.py "$downloads/$archive" "$sums" "$out/$archive" 2>"$out/fetch.log" || return 1
  tar -xzf "$out/$archive" -C "$out" --strip-components=1 2>/dev/null || echo "$downloads/$archive cannot be unpacked" >"$out/fetch.log"
  rm -f "$out/$archive"
  [ ! -s "$out/fetch.log" ]
}

in_cli() { (cd setup/pulumi && "$@" github.com/pulumi/pulumi/pkg/v3/cmd/pulumi); }

in_host() { (cd setup/language-python && "$@" github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python); }

packages() { go list -mod=readonly -deps "$1"; }

# modules LABEL PACKAGE: fetches all that the package is made of.
modules() { progress "$1" --match '^go: downloading (\S+)' -- go list -mod=readonly -deps "$2"; }

# compile LABEL FLAGS PACKAGE: Go names each package that it compiles, if it was not compiled before.
compile() {
  progress "$1" --match '^([\w./-]+)$' --total "$(packages "$3" 2>/dev/null | wc -l)" -- \
    go build -v -mod=readonly -buildvcs=false -trimpath -o "$out/$1" -ldflags "$2" "$3"
}

build() {
  export CGO_ENABLED=0
  mkdir -p "$out"
  in_host modules pulumi-language-python &
  in_cli modules pulumi || { wait; return 1; }
  wait "$!"
  in_cli compile pulumi "-s -w -X github.com/pulumi/pulumi/sdk/v3/go/common/version.Version=$version"
  in_host compile pulumi-language-python "-s -w"
  sdk=$(cd setup/pulumi && go list -mod=readonly -m -f '{{.Dir}}' github.com/pulumi/pulumi/sdk/v3)
  install -m 0755 "$sdk/python/cmd/pulumi-language-python-exec" "$sdk/python/dist/pulumi-resource-pulumi-python" "$out"
}

if find_own; then use "$own" "your own, $own ($("$own" version))"; exit 0; fi
if [ -n "$old" ]; then say "your own is older than $version, which this needs, and is left alone ($old)"; fi
if made; then use "$out/pulumi" "$version is there"; exit 0; fi
if download; then use "$out/pulumi" "$version, Pulumi's download"; exit 0; fi
if recent_go "$needed_go"; then
  find_python || python=python3
  say "Pulumi's download cannot be had ($(cat "$out/fetch.log" 2>/dev/null || uname -sm)): building $version by Go, 4 minutes of two processors"
  build
  use "$out/pulumi" "$version, built by $(go env GOVERSION)"
  exit 0
fi
fail "there is no Pulumi $version or later, $(cat "$out/fetch.log" 2>/dev/null || uname -sm), and no Go $needed_go or later to build it: install one of them (pulumi.com/docs/install)"
