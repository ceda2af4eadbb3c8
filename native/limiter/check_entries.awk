# Every function that cuda.h declares, and every name that it maps one to, must be in entries.tsv.
# Usage: awk -f check_entries.awk entries.tsv cuda.h
BEGIN { FS = "\t"; num_names = 0; num_missing = 0 }

FNR == NR {
    if ($0 ~ /^#/) next
    if ($2 !~ /^(allocates|frees|reports|resolves|none)$/ || NF != 5 || $5 == "") {
        print FILENAME ": `" $1 "` needs a class and a reason"
        num_missing++
    }
    known[$1] = 1
    next
}

# Comments go, also those over several lines, and what the C preprocessor would join.
{
    line = line $0
    if (sub(/\\$/, " ", line)) next
    text = line " "
    line = ""
    if (in_comment) {
        if (!match(text, /\*\//)) next
        text = substr(text, RSTART + 2)
        in_comment = 0
    }
    while (match(text, /\/\*/)) {
        before = substr(text, 1, RSTART - 1)
        rest = substr(text, RSTART + 2)
        if (!match(rest, /\*\//)) { text = before; in_comment = 1; break }
        text = before " " substr(rest, RSTART + 2)
    }
    sub(/\/\/.*/, "", text)
    while (match(text, /CUDAAPI[ \t]+cu[A-Za-z0-9_]+[ \t]*\(/)) {
        name = substr(text, RSTART, RLENGTH)
        text = substr(text, RSTART + RLENGTH)
        gsub(/CUDAAPI|[ \t(]/, "", name)
        need(name)
    }
    if (text ~ /^[ \t]*#[ \t]*define[ \t]+cu[A-Za-z0-9_]+[ \t]+/) {
        sub(/^[ \t]*#[ \t]*define[ \t]+cu[A-Za-z0-9_]+[ \t]+/, "", text)
        sub(/__CUDA_API_PT[DS][SZ]\(/, "", text)
        if (match(text, /^cu[A-Za-z0-9_]+/)) need(substr(text, RSTART, RLENGTH))
    }
}

function need(name) {
    sub(/_pt[ds][sz]$/, "", name)
    if (name in seen) return
    seen[name] = 1
    num_names++
    if (name in known) return
    print "`" name "` is not classed in entries.tsv: does it allocate, free or report device memory?"
    num_missing++
}

END {
    if (num_names < 300) { print "only " num_names " functions found: is this cuda.h?"; exit 1 }
    print num_names " functions, " num_missing " not classed"
    exit num_missing > 0
}
