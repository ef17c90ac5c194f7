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

# use COMMAND PATH TEXT: record which Pulumi is run, and print TEXT by the command if it has changed.
use() {
  mkdir -p "$out"
  [ "$(cat "$out/cli" 2>/dev/null)" != "$2" ] || set -- unchanged "$2" "$3"
  echo "$2" >"$out/cli"
  "$1" "$3"
}

made() { [ -e "$out/cli" ] && [ -x "$out/pulumi" ] && [ "$("$out/pulumi" version 2>/dev/null)" = "$version" ] && [ -x "$out/pulumi-resource-pulumi-python" ]; }

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

packages() { go list -mod=readonly $modfile $tags -deps "$1"; }

# modules PACKAGE: fetches all that the package is made of.
modules() { progress pulumi-modules --match '^go: downloading (\S+)' -- go list -mod=readonly -deps "$1"; }

# compile NAME FLAGS PACKAGE: Go names each package that it compiles, if it was not compiled before. Code that is not optimized is
# compiled in two thirds of the time, and Pulumi waits for Python and for hosts; Go's own library is what its start needs.
compile() {
  progress "$1" --match '^([\w./-]+)$' --total "$(packages "$3" 2>/dev/null | wc -l)" -- \
    go build -v -mod=readonly $modfile $tags -buildvcs=false -trimpath "-gcflags=all=-N -l -dwarf=false" "-gcflags=std=-dwarf=false" \
    -o "$out/$1" -ldflags "$2" "$3"
}

module() { go list -mod=readonly -m -f '{{.Dir}}' "$1"; }

# shorten: sets `modfile` and `tags` to what leaves a quarter of the work out: `pulumi cloud`, whose OpenAPI reader is generic code
# that takes long to compile, and gRPC's load balancers, which Google's library imports beside its own tag for leaving them out.
shorten() {
  cli=$(cd setup/pulumi && module github.com/pulumi/pulumi/pkg/v3)
  storage=$(cd setup/pulumi && module cloud.google.com/go/storage)
  source=$out/source
  rm -rf "$source"
  mkdir -p "$source/cli" "$source/storage"
  (cd "$cli" && tar -cf - --exclude testdata .) | (cd "$source/cli" && tar -xf -)
  (cd "$storage" && tar -cf - --exclude testdata .) | (cd "$source/storage" && tar -xf -)
  chmod -R u+w "$source"
  cloud=cmd/pulumi/cloud
  {
    sed -e '/pb33f\/libopenapi/d' -e '/"slices"$/d' -e '/"sort"$/d' -e '/"fmt"$/d' -e '/^func parseIndex/,$d' "$cli/$cloud/spec.go"
    echo 'func parseIndex([]byte) (*Index, error) {'
    echo '	return nil, NewAPIError(cmdutil.ExitInternalError, ErrSpecParse, "this Pulumi was built without `pulumi cloud`")'
    echo '}'
    sed -n -e '/^func mdInline/,/^}/p' -e '/^func markdownEnumTail/,/^}/p' "$cli/$cloud/schema.go"
  } >"$source/cli/$cloud/spec.go"
  echo 'package cloud' >"$source/cli/$cloud/schema.go"
  sed -e '/grpc\/balancer\/rls"/d' -e '/grpc\/xds\/googledirectpath"/d' "$storage/grpc_dp_diag.go" >"$source/storage/grpc_dp_diag.go"
  cp setup/pulumi/go.mod setup/pulumi/go.sum "$source"
  # Relative to setup/pulumi, for a checkout in a folder with a space.
  there=../../.cache/pulumi/source
  go mod edit -replace "github.com/pulumi/pulumi/pkg/v3=$there/cli" -replace "cloud.google.com/go/storage=$there/storage" "$source/go.mod"
  modfile=-modfile=$there/go.mod tags=-tags=disable_grpc_modules
}

build() {
  export CGO_ENABLED=0
  modfile='' tags=''
  mkdir -p "$out"
  in_host packages >/dev/null 2>&1 & # compiling it says why if this fails
  in_cli modules || return 1
  wait "$!" || true
  shorten
  in_cli compile pulumi "-s -w -X github.com/pulumi/pulumi/sdk/v3/go/common/version.Version=$version"
  modfile='' tags=''
  rm -rf "$source"
  in_host compile pulumi-language-python "-s -w"
  sdk=$(cd setup/pulumi && module github.com/pulumi/pulumi/sdk/v3)
  install -m 0755 "$sdk/python/cmd/pulumi-language-python-exec" "$sdk/python/dist/pulumi-resource-pulumi-python" "$out"
}

alone
if find_own; then use say "$own" "your own, $own ($("$own" version))"; exit 0; fi
if [ -n "$old" ]; then say "your own is older than $version, which this needs, and is left alone ($old)"; fi
if made; then use say "$out/pulumi" "$version is there"; exit 0; fi
rm -f "$out/cli"
if download; then use finish "$out/pulumi" "$version, Pulumi's download"; exit 0; fi
if recent_go "$needed_go"; then
  find_python || python=python3
  say "Pulumi's download cannot be had ($(cat "$out/fetch.log" 2>/dev/null || uname -sm)): building $version by Go"
  build
  use finish "$out/pulumi" "$version, built by $(go env GOVERSION)"
  exit 0
fi
fail "there is no Pulumi $version or later, $(cat "$out/fetch.log" 2>/dev/null || uname -sm), and no Go $needed_go or later to build it: install one of them (pulumi.com/docs/install)"
