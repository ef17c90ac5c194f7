#!/bin/sh
# The Pulumi CLI: the user's own if it is on PATH, else built from Pulumi's Go modules, else by Pulumi's official installer.
set -eu
root=$(dirname "$(dirname "$(readlink -f "$0")")")
out=$root/.cache/pulumi
version=v3.250.0

say() { echo "pulumi: $*"; }

built() { [ -x "$out/pulumi" ] && [ "$("$out/pulumi" version 2>/dev/null)" = "$version" ] && [ -x "$out/pulumi-resource-pulumi-python" ]; }

# Not a checkout's wrapper, which is called pulumi too.
own() {
  IFS=:
  for folder in $PATH "$HOME/.pulumi/bin"; do
    [ -x "$folder/pulumi" ] || continue
    case $(readlink -f "$folder/pulumi") in
      */setup/pulumi.sh) ;;
      *) unset IFS; say "$("$folder/pulumi" version) of your own, $folder/pulumi"; return 0 ;;
    esac
  done
  unset IFS
  return 1
}

recent_go() { command -v go >/dev/null && printf '%s\n%s\n' go1.25.11 "$(go env GOVERSION)" | sort -VC; }

# Go names each package that it compiles, if it was not compiled before.
compile() {
  name=$1 package=$2
  shift 2
  "$root/.venv/bin/python" "$root/setup/progress.py" "$name" --log "$out/$name.log" --match '^([\w./-]+)$' \
    --total "$(go list -mod=readonly -deps "$package" | wc -l)" -- go build -v -mod=readonly -buildvcs=false -trimpath "$@" "$package"
}

build() {
  say "building the CLI $version with $(go env GOVERSION): about 4 minutes, once"
  mkdir -p "$out"
  cd "$root/setup/pulumi"
  compile pulumi github.com/pulumi/pulumi/pkg/v3/cmd/pulumi -o "$out/pulumi" \
    -ldflags "-s -w -X github.com/pulumi/pulumi/sdk/v3/go/common/version.Version=$version"
  sdk=$(go list -mod=readonly -m -f '{{.Dir}}' github.com/pulumi/pulumi/sdk/v3)
  install -m 0755 "$sdk/python/cmd/pulumi-language-python-exec" "$sdk/python/dist/pulumi-resource-pulumi-python" "$out"
  say "building the Python language host: half a minute"
  cd "$root/setup/language-python"
  compile language-host github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python \
    -o "$out/pulumi-language-python" -ldflags "-s -w"
}

installer() {
  say "no Go 1.25.11 or later: running Pulumi's official installer"
  mkdir -p "$out"
  "$root/.venv/bin/python" -c 'import sys, urllib.request as u; u.urlretrieve("https://get.pulumi.com", sys.argv[1])' "$out/install.sh" &&
    command -v curl >/dev/null && sh "$out/install.sh" --version "${version#v}" --install-root "$out/root" --no-edit-path >/dev/null &&
    ln -sf "$out"/root/bin/* "$out/" && rm -f "$out/install.sh"
}

if built; then say "$version is there"; exit 0; fi
own && exit 0
if recent_go; then build; say "built $version"; exit 0; fi
installer && { say "installed $version"; exit 0; }
echo "pulumi: no Pulumi here: install the Pulumi CLI (pulumi.com/docs/install), or curl for its installer, or Go 1.25.11 or later, then try again" >&2
exit 2
