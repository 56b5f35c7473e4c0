#!/bin/sh
# Packs busybox into an image that needs no registry. Two names, one content:
# holdfast.local/busybox:1 to run things, holdfast.local/pause:1 to hold sandboxes.
# usage: hack/pack-image.sh OUT.tar
set -eu

out=${1:?usage: hack/pack-image.sh OUT.tar}
busybox=$(command -v busybox) || {
    echo "hack/pack-image.sh: no busybox; run hack/deps.sh runtime" >&2
    exit 1
}
if ldd "$busybox" >/dev/null 2>&1; then
    echo "hack/pack-image.sh: $busybox is not static; run hack/deps.sh runtime" >&2
    exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root/bin" "$root/etc" "$root/tmp" "$root/proc" "$root/sys" "$root/dev" "$root/root"
chmod 1777 "$root/tmp"
cp -L "$busybox" "$root/bin/busybox"
for applet in $("$busybox" --list); do
    [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
done
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$root/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"

pack() {
    tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$1" -cf "$2" .
}
mkdir "$work/image"
pack "$root" "$work/image/layer.tar"
layer=$(sha256sum "$work/image/layer.tar" | cut -d' ' -f1)
case $(uname -m) in
x86_64) arch=amd64 ;;
aarch64) arch=arm64 ;;
*) arch=$(uname -m) ;;
esac

# $1 = file, $2 = what the image runs, as JSON
config() {
    cat >"$work/image/$1" <<EOF
{"architecture":"$arch","os":"linux","created":"1970-01-01T00:00:00Z",
 "config":{"Env":["PATH=/bin"],"Cmd":$2},
 "rootfs":{"type":"layers","diff_ids":["sha256:$layer"]}}
EOF
}
config busybox.json '["sh"]'
# The shell reaps what a shared process namespace leaves behind, and ends on SIGTERM.
config pause.json '["sh","-c","trap \"exit 0\" TERM INT; while :; do sleep 86400 & wait $!; done"]'
cat >"$work/image/manifest.json" <<EOF
[{"Config":"busybox.json","RepoTags":["holdfast.local/busybox:1"],"Layers":["layer.tar"]},
 {"Config":"pause.json","RepoTags":["holdfast.local/pause:1"],"Layers":["layer.tar"]}]
EOF
pack "$work/image" "$work/image.tar"
mv "$work/image.tar" "$out"
