#!/usr/bin/env bash
# text_corpus.sh - 45 MB of English text as token shards, for comparisons in which no run may see a token twice. Fetches three Debian
# packages (24 MB) by name, also as a plain user, strips their markup, cuts the text into documents of about 4 kB and makes a tokenizer:
#   dict-gcide    Webster's dictionary of 1913 with its quotations     29 MB of text    GPL-2 or later
#   anarchism     "An Anarchist FAQ", modern prose                     11 MB            GPL-2
#   dict-foldoc   the Free On-line Dictionary of Computing              5 MB            GFDL
# The documents of the three are merged evenly, and validation text is every so many-th of them, so any part of it has the same mix as
# training (whose sequences are shuffled anyway).
# usage: scripts/text_corpus.sh OUT [VOCABULARY]     writes OUT_train_*.bin, OUT_val_*.bin (about 200,000 tokens), OUT_tokenizer.bin
#                                                    (vocabulary: 2048). KEEP=1 keeps the text as OUT.txt
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 1
}

if [ $# -lt 1 ] || [ $# -gt 2 ]; then fail "usage: scripts/text_corpus.sh OUT [VOCABULARY], such as scripts/text_corpus.sh build/corpus"; fi
vocabulary=${2:-2048}
[[ $vocabulary =~ ^[0-9]{3,6}$ ]] || fail "a vocabulary of $vocabulary: expected a number of tokens"
[[ $1 == *[^/] ]] || fail "OUT $1: expected the beginning of file names, such as build/corpus"
mkdir -p "$(dirname "$1")" || fail "cannot make the folder of $1"
out=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."
for tool in apt-get dpkg-deb awk sed gzip; do
    command -v $tool > /dev/null || fail "$tool is missing: the text comes from Debian packages, so this needs Debian or Ubuntu"
done
[ -x ./train_gpt ] || make train_gpt >&2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
chmod 755 "$work" # apt gives up root for the download
export LC_ALL=C

# One package into the work folder; stale package lists are renewed once, where we may.
fetch() { # package
    local root=(sudo -n)
    [ "$(id -u)" -ne 0 ] || root=()
    if ! download "$1" && ! { "${root[@]}" apt-get -q update && download "$1"; } > "$work/log" 2>&1; then
        fail "cannot fetch the Debian package $1: $(grep -E '^(E|Err|W):' "$work/log" | tail -n 1 || true) (offline, or old lists: apt-get update)"
    fi
    dpkg-deb -x "$work/$1"_*.deb "$work" || fail "$1: the package is broken"
    rm -f "$work/$1"_*.deb
}
download() { (cd "$work" && timeout 300 apt-get -q -o Acquire::Retries=2 download "$1") > "$work/log" 2>&1; }

# A file of the dict server: entries begin at the margin, the rest is indented. Out come paragraphs, one a line, and an empty line
# before each entry; pronunciations, sources in brackets and the braces of references go.
from_dict() {
    gzip -cd < "$1" | awk '
        /^[^ ]/ { flush(); print "" }
        { gsub(/\\[^\\]*\\/, ""); gsub(/\[[^\]]*(Webster|PJC|WordNet|Century|Hitchcock|Easton|RH|AS|GG)[^\]]*\]/, "")
          gsub(/[{}]/, ""); gsub(/[ \t]+/, " "); sub(/^ /, ""); sub(/ $/, "") }
        /^$/ { flush(); next }
        { paragraph = paragraph == "" ? $0 : paragraph " " $0 }
        END { flush() }
        function flush() { if (paragraph != "") { print paragraph } paragraph = "" }'
}

# Pages of HTML: block elements end a paragraph, other tags go, and the entities that occur are resolved. An empty line before each.
from_html() { # files
    cat -- "$@" | tr '\n' ' ' |
        sed -E 's/<\/?(p|h[1-6]|li|div|blockquote|ul|ol|br|tr|title|table)([ \/][^>]*)?>/\n/g; s/<[^>]*>//g' |
        sed -E "s/&nbsp;/ /g; s/&quot;/\"/g; s/&#0?39;/'/g; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\\&/g; s/[ \t\r]+/ /g; s/^ //; s/ $//; /^$/d" |
        sed G
}

# Documents of at least 4,000 bytes, cut where an entry or a paragraph begins.
documents() {
    awk -v end="$separator" '/^$/ { if (bytes >= 4000) { print end; bytes = 0 } next } { bytes += length($0) + 1; print } END { print end }'
}

# Files of documents into one: next comes a document of the file of which the smallest share has been taken.
merge() { # files
    awk -v end="$separator\n" 'BEGIN { RS = end; files = ARGC - 1 }
        FNR == 1 { file++ }
        NF { text[file, ++count[file]] = $0 }
        END {
            for (;;) {
                next_file = 0
                for (i = 1; i <= files; i++) {
                    share = (taken[i] + 0.5) / count[i]
                    if (taken[i] < count[i] && (!next_file || share < least)) { next_file = i; least = share }
                }
                if (!next_file) { exit }
                printf "%s%s", text[next_file, ++taken[next_file]], end
            }
        }' "$@"
}

separator="=====8<====="
echo "notice: fetching dict-gcide, anarchism, dict-foldoc (24 MB)" >&2
for package in dict-gcide anarchism dict-foldoc; do fetch $package; done
echo "notice: stripping markup" >&2
from_dict "$work/usr/share/dictd/gcide.dict.dz" | documents > "$work/gcide"
from_html "$work"/usr/share/doc/anarchism/html/*.html | documents > "$work/anarchism.txt"
from_dict "$work/usr/share/dictd/foldoc.dict.dz" | documents > "$work/foldoc"
merge "$work/gcide" "$work/anarchism.txt" "$work/foldoc" > "$work/text.txt"
bytes=$(wc -c < "$work/text.txt")
[ "$bytes" -ge 40000000 ] || fail "only $bytes bytes of text came out, expected 40 MB: the packages are not what they were"
[ -z "${KEEP:-}" ] || cp "$work/text.txt" "$out.txt"
echo "notice: ./train_gpt tokenize text.txt --output $out --vocab-size $vocabulary --val-fraction 0.012" >&2
./train_gpt tokenize "$work/text.txt" --output "$out" --vocab-size "$vocabulary" --document-separator "$separator" --val-fraction 0.012
