#!/bin/sh
# Checks the words of documents and doc comments. usage: hack/words.sh [-v] [update] [FILE...]
#
#   long      sentences of more than 40 words in README.md and docs/*.md; a table cell is a text of its own
#   glossary  phrases that have a plainer replacement, in Markdown outside of code (the list is below)
#   clause    doc comments in src/ that begin with a bare clause, like "What a pod wants"
#
# hack/words.txt has the count that each file may have; other files have none. A file with more fails: reword the text. A file
# with less may have a lower count: `hack/words.sh update` lowers it, and never raises one. The sum of each kind may not be larger
# than in the last two commits either, so that nobody raises a count by hand. -v prints every place.
set -eu
cd "$(dirname "$0")/.."
allowed=hack/words.txt

verbose= mode=check
for word; do
    case $word in
    -v) verbose=1; shift ;;
    update) mode=update; shift ;;
    -*) echo "usage: hack/words.sh [-v] [update] [FILE...]" >&2; exit 2 ;;
    *) break ;;
    esac
done

# Phrase, then what to write instead. A phrase is an extended regular expression over lower case.
glossary='
tells?|told|telling|untold=log, emit, report, patch
on record=stored, persisted, recorded
(bring|brings|brought) again=pull or import again
(earlier|former|next|previous) li(fe|ves)=run of the agent
hands=manual recovery; "passes" for the verb
set aside=moved to quarantine
lets? in=authenticated, authorized
in force=applied, valid
loss(es)? of power=power loss
stor(y|ies)=scenario
mend(s|ed)?=repair, correct
has spoken|have spoken=has synced
goes down=shuts down
freez(e|es)|froze(n)?=keeps the last valid version
storage elsewhere=remote volume
parts? of (a )?volumes?=subPath mount
strays?=orphaned mount
(is|are|was|were) looked at|a look|looks at=poll, list, check
goes with=is deleted with
not there yet=not supported yet
owed|condemned|verdicts?=pending, to be stopped, decision
(stops?|stopped|ends?|ended|down) in order=cleanly
by luck|would be a lie=what happens instead'

# Prints "kind path line text" for each place.
places() {
    set -- README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md docs/*.md
    printf '%s\n' "$glossary" | LC_ALL=C awk '
        FILENAME == "-" {
            if (split($0, pair, "=") == 2) { n++; phrase[n] = "(^|[^a-z])(" pair[1] ")($|[^a-z])"; better[n] = pair[2] }
            next
        }
        function sentences(text, at, one, tokens, token, words, k) {
            while (text != "") {
                if (match(text, /[.!?][)"]*( |$)/)) { one = substr(text, 1, RSTART); text = substr(text, RSTART + RLENGTH) }
                else { one = text; text = "" }
                tokens = split(one, token, " "); words = 0
                for (k = 1; k <= tokens; k++) if (token[k] ~ /[A-Za-z0-9]/) words++
                if (words > 40) print "long", file, at, one
            }
        }
        function flush() { if (paragraph != "" && has_long) sentences(paragraph, begin); paragraph = "" }
        FNR == 1 { flush(); file = FILENAME; fenced = 0; has_long = FILENAME == "README.md" || FILENAME ~ /^docs\// }
        /^ *```/ { flush(); fenced = !fenced; next }
        fenced { next }
        {
            line = $0
            gsub(/`[^`]*`/, "X", line); gsub(/\]\([^)]*\)/, "", line); gsub(/[][*]/, "", line)
            lower = tolower(line)
            for (i = 1; i <= n; i++) {
                rest = lower
                while (match(rest, phrase[i])) {
                    word = substr(rest, RSTART, RLENGTH); gsub(/^[^a-z]|[^a-z]$/, "", word)
                    print "glossary", FILENAME, FNR, "\"" word "\": " better[i]
                    rest = substr(rest, RSTART + RLENGTH - 1)
                }
            }
        }
        /^\|/ { flush(); if (has_long) { cells = split(line, cell, "|"); for (i = 1; i <= cells; i++) sentences(cell[i], FNR) } next }
        /^#/ || /^ *$/ { flush(); next }
        /^ *([-*+]|[0-9]+[.)]) / { flush() }
        {
            sub(/^ *([-+]|[0-9]+[.)])? */, "", line)
            if (paragraph == "") { paragraph = line; begin = FNR } else paragraph = paragraph " " line
        }
        END { flush() }
    ' - "$@"
    find src -name '*.rs' | LC_ALL=C sort | xargs awk '
        FNR == 1 { inside = 0 }
        /^ *\/\/[\/!]/ {
            if (!inside && $2 ~ /^(What|Who|Whose|How|That|Whether|Where|Why|Which)$/ && $0 !~ /\?$/) {
                text = $0; sub(/^ */, "", text); print "clause", FILENAME, FNR, text
            }
            inside = 1; next
        }
        { inside = 0 }
    '
}

found=$(mktemp)
trap 'rm -f "$found" "$found.before"' EXIT
places >"$found"
if [ -n "$verbose" ] || [ $# -gt 0 ]; then
    awk -v files="$*" '
        BEGIN { n = split(files, wanted, " "); for (i = 1; i <= n; i++) only[wanted[i]] }
        n == 0 || $2 in only { kind = $1; at = $2 ":" $3; $1 = $2 = $3 = ""; print at ": " kind ":" $0 }' "$found"
fi

if [ $mode = update ]; then
    first=; [ -e $allowed ] || first=1
    [ -e $allowed ] || : >$allowed
    awk -v first="$first" '
        FILENAME == ARGV[1] { count[$1 " " $2]++; next }
        { allowed[$2 " " $3] = $1; next }
        END { for (key in count) { most = first ? count[key] : allowed[key] + 0
            if (most > count[key]) most = count[key]
            if (most > 0) { split(key, part, " "); print most, part[1], part[2] } } }
    ' "$found" $allowed | LC_ALL=C sort -k3,3 -k2,2 >"$found.new"
    mv "$found.new" $allowed
fi

# A file may move and take its count along; only sums are compared.
for commit in HEAD HEAD~1; do
    git show "$commit:$allowed" >"$found.before" 2>/dev/null || continue
    awk -v commit="$commit" '
        FILENAME == ARGV[1] { before[$2] += $1; next }
        { now[$2] += $1 }
        END {
            for (kind in now) if (now[kind] > before[kind] + 0) {
                printf "hack/words.sh: the counts of kind \"%s\" in hack/words.txt are %d, in %s they are %d: they only shrink\n", \
                    kind, now[kind], commit, before[kind]
                failed = 1
            }
            exit failed
        }' "$found.before" "$allowed"
done

awk '
    FILENAME == ARGV[1] { allowed[$2 " " $3] = $1; next }
    { key = $1 " " $2; count[key]++; where[key] = where[key] "\n    line " $3 ": " substr($0, length($1 $2 $3) + 4, 100) }
    END {
        for (key in count) if (count[key] > allowed[key] + 0) {
            split(key, part, " "); failed = 1
            printf "hack/words.sh: %s: %d of kind \"%s\", allowed %d; reword one of:%s\n", part[2], count[key], part[1], allowed[key], where[key]
        }
        for (key in allowed) if (allowed[key] > count[key] + 0) lower++
        if (lower) printf "hack/words.sh: %d counts in hack/words.txt can be lowered: hack/words.sh update\n", lower
        exit failed
    }
' $allowed "$found"
