#!/bin/sh
# Builds the documentation site with mdBook into target/book/html, then checks every link of every page: its file and its anchor
# exist. Links to other sites are not followed.
set -eu
cd "$(dirname "$0")/.."
. hack/lock.sh

mdbook=$(hack/mdbook.sh)
book=$PWD/target/book
hold "$PWD/target/book.lock" "the site of $PWD" 120
rm -rf "$book"
mkdir -p "$book/src"
cp docs/book.toml "$book/book.toml"

# The pages keep their places, so that their links hold; so do the files that they link to.
for page in README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md CHANGELOG.md tests/flaky.md docs/*.md; do
    mkdir -p "$book/src/${page%"${page##*/}"}"
    # mdBook makes index.html of a README.md.
    [ "$page" = docs/SUMMARY.md ] || sed 's|\(\]([^)]*\)README\.md|\1index.md|g' "$page" >"$book/src/$page"
    awk '/^ *```/ { fenced = !fenced } !fenced' "$page" | { grep -oE '\]\([^)# ]+' || true; } | sed 's/^](//' | while read -r link; do
        case $link in *://* | mailto:* | *.md) continue ;; esac
        file=$(realpath -m --relative-to=. "${page%"${page##*/}"}./$link")
        case $file in ../*) continue ;; esac
        [ -f "$file" ] || continue
        mkdir -p "$book/src/$(dirname "$file")"
        cp "$file" "$book/src/$file"
    done
done
# SUMMARY.md is in docs/, with links from there; mdBook wants it at the top.
sed 's|](\([^.)][^)]*\))|](docs/\1)|; s|](\.\./|](|' docs/SUMMARY.md >"$book/src/SUMMARY.md"

"$mdbook" build "$book" --dest-dir "$book/html" >"$book/log" 2>&1 || {
    cat "$book/log" >&2
    exit 1
}
if grep -E '^ *(WARN|ERROR)' "$book/log" >&2; then
    echo "make docs: mdBook warns, see above" >&2
    exit 1
fi

cd "$book/html"
find . -type f | sed 's|^\./||' | LC_ALL=C sort >../files
# toc.html is a part of each page, with links from the top; nobody is sent to 404.html.
# shellcheck disable=SC2046 # names of pages have no spaces
LC_ALL=C awk '
    function normal(path, parts, n, i, out, m) {
        n = split(path, parts, "/"); m = 0
        for (i = 1; i <= n; i++) {
            if (parts[i] == "" || parts[i] == ".") continue
            if (parts[i] == ".." && m > 0) m--
            else out[++m] = parts[i]
        }
        path = ""
        for (i = 1; i <= m; i++) path = path (i > 1 ? "/" : "") out[i]
        return path
    }
    FILENAME == "../files" { exists[$0] = 1; next }
    {
        line = $0
        while (match(line, /[ \t](id|href|src)="[^"]*"/)) {
            found = substr(line, RSTART + 1, RLENGTH - 2); line = substr(line, RSTART + RLENGTH)
            kind = found; sub(/=.*/, "", kind); sub(/^[a-z]*="/, "", found)
            if (kind == "id") { anchor[FILENAME "#" found] = 1; continue }
            if (found ~ /^[a-z]+:/ || found ~ /^\/\// || found == "") continue
            links++; from[links] = FILENAME; to[links] = found
        }
    }
    END {
        for (i = 1; i <= links; i++) {
            target = to[i]; gsub(/&amp;/, "\\&", target); gsub(/&#39;/, "\x27", target)
            hash = index(target, "#"); part = ""
            if (hash) { part = substr(target, hash + 1); target = substr(target, 1, hash - 1) }
            dir = from[i]; if (!sub(/[^\/]*$/, "", dir)) dir = ""
            file = target == "" ? from[i] : normal(dir target)
            if (target ~ /\/$/) file = file "/index.html"
            if (!(file in exists)) { print "make docs: " from[i] " links to " to[i] ": there is no " file; bad++ }
            else if (part != "" && file ~ /\.html$/ && !((file "#" part) in anchor)) {
                print "make docs: " from[i] " links to " to[i] ": no such anchor"; bad++
            }
        }
        printf "%d links of %d files hold\n", links - bad, ARGC - 2
        exit bad > 0
    }' ../files $(grep '\.html$' ../files | grep -vxE 'toc\.html|404\.html') >../links || {
    grep '^make docs' ../links >&2
    exit 1
}
cat ../links
echo "the site is in $book/html/index.html"
