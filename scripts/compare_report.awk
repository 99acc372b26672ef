# compare_report.awk - tables from the JSON lines of scripts/compare_optimizers.sh (one object a run, written by it, so plain patterns read
# them), and data files for the pictures. Variables: data (only runs on these shards), folder (for the data files; empty: none), every
# (1: all settings of all arms are listed, too), times (a file of lines "arm ms" of scripts/compare_times.sh), mode (best: only
# each arm's best setting at its greatest length, as "arm<tab>options").
# A setting is an arm's options; its loss is the mean over seeds. An arm's best setting is that of the lowest loss among those that were
# run with the most seeds. A run that ended by "not finite" makes its setting the worst; on pictures it has the loss of the start.

BEGIN { while (times != "" && (getline line < times) > 0) { split(line, word, " "); timed[word[1]] = word[2] } }

function get(name, text) {
    if (!match($0, "\"" name "\":(\"[^\"]*\"|[^,}]*)")) { return "" }
    text = substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3)
    gsub(/"/, "", text)
    return text
}

# An option's value in a text of options, and the text without some of them.
function option(text, name) {
    return match(" " text " ", " " name " [^ ]+") ? substr(text, RSTART + length(name) + 1, RLENGTH - length(name) - 2) : ""
}
function without(text, name) {
    text = " " text " "
    sub(" " name " [^ ]+", "", text)
    gsub(/^ +| +$/, "", text)
    return text
}
function log2(x) { return log(x) / log(2) }

/\]}$/ && get("data") == data && !((get("arm"), get("key")) in known) { # a line that was cut is none
    known[get("arm"), get("key")]
    arm = get("arm"); steps = get("steps"); seed = get("seed"); options = get("options")
    s = arm SUBSEP steps SUBSEP options
    if (!(s in runs)) { setting[++settings] = s; arm_of[s] = arm; steps_of[s] = steps; options_of[s] = options; shown[s] = get("setting") }
    if (!((arm, steps) in has)) { has[arm, steps]; if (!(arm in arm_number)) { arms[++arm_count] = arm; arm_number[arm] = arm_count } }
    if (!(steps in length_seen)) { lengths[++length_count] = steps; length_seen[steps] }
    n = ++runs[s]
    seed_at[s, n] = seed
    run_of[s, seed] = n
    curve = $0
    sub(/.*"curve":\[/, "", curve)
    gsub(/[\]\[}]/, "", curve)
    points = split(curve, number, ",") / 2
    for (i = 1; i <= points; i++) { at[s, n, i] = number[2 * i - 1]; val[s, n, i] = number[2 * i] }
    count[s, n] = points
    start = number[2] + 0
    diverged = get("diverged") == "true"
    loss[s, n] = diverged ? 1e9 : get("loss") + 0
    capped[s, n] = diverged || loss[s, n] > start ? start : loss[s, n]
    sum[s] += loss[s, n]
    state[s] = get("state")
    if (get("tokens") + 0 > tokens[steps]) { tokens[steps] = get("tokens") + 0 }
}

function mean(s) { return sum[s] / runs[s] }
function mean_text(s) { return mean(s) < 1e6 ? sprintf("%.4f", mean(s)) : "not finite" }
function spread(s, i, d) {
    if (runs[s] < 2) { return "-" }
    for (i = 1; i <= runs[s]; i++) { d += (loss[s, i] - mean(s)) ^ 2 }
    return sprintf("%.4f", sqrt(d / (runs[s] - 1)))
}

# Tokens at which the n-th run's curve first meets a loss, on straight lines between its points; 0: never.
function tokens_to(s, n, target, i) {
    for (i = 1; i <= count[s, n]; i++) {
        if (val[s, n, i] > target) { continue }
        if (i == 1) { return at[s, n, 1] }
        return at[s, n, i - 1] + (at[s, n, i] - at[s, n, i - 1]) * (val[s, n, i - 1] - target) / (val[s, n, i - 1] - val[s, n, i])
    }
    return 0
}
function final(s, n) { return val[s, n, count[s, n]] }

function choose_best(i, s, k) {
    for (i = 1; i <= settings; i++) {
        s = setting[i]
        k = arm_of[s] SUBSEP steps_of[s]
        if (!(k in best) || runs[s] > runs[best[k]] || (runs[s] == runs[best[k]] && mean(s) < mean(best[k]))) { best[k] = s }
    }
}

# AdamW's tokens over those that this setting needs for AdamW's final loss on the curve: seed by seed, then the mean.
function speedup(s, base, i, seed, target, t, total, k) {
    for (i = 1; i <= runs[s]; i++) {
        seed = seed_at[s, i]
        k = ((base, seed) in run_of) ? run_of[base, seed] : 1
        t = tokens_to(s, i, final(base, k))
        if (t <= 0) { return 0 }
        total += t
    }
    return total / runs[s]
}

function table(steps, base, i, k, s, t, timed_both) {
    printf "\n%d steps, %d tokens:\n\n", steps, tokens[steps]
    printf "| arm | best setting | validation loss | spread | seeds | tokens to AdamW's loss | AdamW's / these "
    print "| state, bytes per parameter | step ms / AdamW's |"
    print "|---|---|---|---|---|---|---|---|---|"
    base = (("adamw", steps) in best) ? best["adamw", steps] : ""
    for (i = 1; i <= arm_count; i++) {
        if (!((arms[i], steps) in best)) { continue }
        s = best[arms[i], steps]
        printf "| %s | %s | %s | %s | %d |", arms[i], shown[s], mean_text(s), spread(s), runs[s]
        t = base != "" && mean(base) < 1e6 && mean(s) < 1e6 ? speedup(s, base) : 0
        if (t > 0) { printf " %.2f M | %.2f |", t / 1e6, tokens[steps] / t } else { printf " - | - |" }
        timed_both = base != "" && (arms[i] in timed) && ("adamw" in timed) # a sweep's own times are those of a loaded machine
        printf " %s | %s |\n", state[s], timed_both ? sprintf("%.2f", timed[arms[i]] / timed["adamw"]) : "-"
    }
}

# Differences of arms with seeds in common, seed by seed, of AdamW or a kind of Kappa with any other. Two standard errors of a mean of 3 are no
# 95 %: for that they would be 4.3.
function pairs(steps, i, j, a, b, n, k, d, sum_d, sum_2, m, head) {
    for (i = 1; i <= arm_count; i++) {
        for (j = i + 1; j <= arm_count; j++) {
            if (!((arms[i], steps) in best) || !((arms[j], steps) in best)) { continue }
            if (arms[i] !~ /^(adamw|kappa.*)$/ && arms[j] !~ /^(adamw|kappa.*)$/) { continue }
            a = best[arms[i], steps]; b = best[arms[j], steps]
            n = sum_d = sum_2 = 0
            for (k = 1; k <= runs[a]; k++) {
                if (!((b, seed_at[a, k]) in run_of) || loss[a, k] > 1e6 || loss[b, run_of[b, seed_at[a, k]]] > 1e6) { continue }
                d = loss[b, run_of[b, seed_at[a, k]]] - loss[a, k]
                n++; sum_d += d; sum_2 += d * d
            }
            if (n < 2) { continue }
            if (!head++) {
                printf "\npaired seeds, %d steps: difference of losses, and 2 standard errors\n\n", steps
                print "| arms | difference | 2 se | seeds |\n|---|---|---|---|"
            }
            m = sum_d / n
            d = (sum_2 - n * m * m) / (n - 1)
            printf "| %s - %s | %+.4f | %.4f | %d |\n", arms[j], arms[i], m, 2 * sqrt((d > 0 ? d : 0) / n), n
        }
    }
}

# The settings that differ from an arm's best in the learning rate only, by rising rate: rate[], height[], their number. Heights are means over
# the seeds that all of them have.
function rates(steps, arm, i, j, k, s, rest, n, t, have, of, common) {
    rest = without(options_of[best[arm, steps]], "--lr")
    for (i = 1; i <= settings; i++) {
        s = setting[i]
        if (arm_of[s] != arm || steps_of[s] != steps || without(options_of[s], "--lr") != rest) { continue }
        of[++n] = s
        for (k = 1; k <= runs[s]; k++) { have[seed_at[s, k]]++ }
    }
    for (i = 1; i <= n; i++) {
        s = of[i]
        rate[i] = option(options_of[s], "--lr") + 0
        height[i] = common = 0
        for (k = 1; k <= runs[s]; k++) {
            if (have[seed_at[s, k]] < n) { continue }
            height[i] += capped[s, k]
            common++
        }
        if (common == 0) { return 0 }
        height[i] /= common
    }
    for (i = 1; i <= n; i++) {
        for (j = i; j > 1 && rate[j] < rate[j - 1]; j--) {
            t = rate[j]; rate[j] = rate[j - 1]; rate[j - 1] = t
            t = height[j]; height[j] = height[j - 1]; height[j - 1] = t
        }
    }
    return n
}

# Mean excess over the lowest loss for rates from a quarter to four times the best one, on straight lines in log2 of the rate.
function sensitivity(steps, i, j, n, low, x0, x1, y0, y1, area, from, to, head, whole) {
    for (i = 1; i <= arm_count; i++) {
        if (!((arms[i], steps) in best) || (n = rates(steps, arms[i])) < 3) { continue }
        for (low = j = 1; j <= n; j++) { if (height[j] < height[low]) { low = j } }
        area = 0
        from = 9
        to = -9
        for (j = 1; j <= n; j++) {
            if (folder != "") { print log2(rate[j] / rate[low]), height[j] > (folder "/rate_" steps "_" arms[i]) }
            if (j == 1) { continue }
            x0 = log2(rate[j - 1] / rate[low]); x1 = log2(rate[j] / rate[low])
            y0 = height[j - 1] - height[low]; y1 = height[j] - height[low]
            if (x1 <= -2 || x0 >= 2) { continue }
            if (x0 < -2) { y0 += (y1 - y0) * (-2 - x0) / (x1 - x0); x0 = -2 }
            if (x1 > 2) { y1 = y0 + (y1 - y0) * (2 - x0) / (x1 - x0); x1 = 2 }
            area += (x1 - x0) * (y0 + y1) / 2
            if (x0 < from) { from = x0 }
            if (x1 > to) { to = x1 }
        }
        if (!head++) {
            printf "\nlearning rate, %d steps: mean excess over the arm's lowest loss from 1/4 to 4 times its best rate\n\n", steps
            print "| arm | best rate | lowest loss | mean excess | rates covered |\n|---|---|---|---|---|"
        }
        whole = from < -1.9 && to > 1.9 # of fewer rates it would be another figure
        printf "| %s | %g | %.4f | %s | x%.2g .. x%.2g |\n", arms[i], rate[low], height[low], whole ? sprintf("%.4f", area / (to - from)) : "-",
            2 ^ from, 2 ^ to
    }
}

# Learning rate x weight decay, for the other options with which most pairs were run.
function grid(steps, arm, i, j, s, rest, most, n, lr, wd, r, c, rows, columns) {
    split("", n); split("", r); split("", c)
    for (i = 1; i <= settings; i++) {
        s = setting[i]
        if (arm_of[s] != arm || steps_of[s] != steps || option(options_of[s], "--weight-decay") == "") { continue }
        rest = without(without(options_of[s], "--lr"), "--weight-decay")
        if (++n[rest] > n[most]) { most = rest }
    }
    for (i = 1; i <= settings; i++) {
        s = setting[i]
        if (arm_of[s] != arm || steps_of[s] != steps || without(without(options_of[s], "--lr"), "--weight-decay") != most) { continue }
        lr = option(options_of[s], "--lr"); wd = option(options_of[s], "--weight-decay")
        if (!(lr in r)) { r[lr]; row[++rows] = lr }
        if (!(wd in c)) { c[wd]; column[++columns] = wd }
        cell[arm, steps, lr, wd] = mean_text(s)
    }
    if (rows < 2 || columns < 2) { return }
    order(row, rows)
    order(column, columns)
    printf "\n%s, %d steps: learning rate (down) x weight decay\n\n|", arm, steps
    for (j = 1; j <= columns; j++) { printf " | %s", column[j] }
    printf " |\n|---"
    for (j = 1; j <= columns; j++) { printf "|---" }
    print "|"
    for (i = 1; i <= rows; i++) {
        printf "| %s", row[i]
        for (j = 1; j <= columns; j++) { printf " | %s", cell[arm, steps, row[i], column[j]] }
        print " |"
    }
}
function order(list, n, i, j, t) {
    for (i = 2; i <= n; i++) { for (j = i; j > 1 && list[j] + 0 < list[j - 1] + 0; j--) { t = list[j]; list[j] = list[j - 1]; list[j - 1] = t } }
}

# Every setting of an arm by rising loss.
function listing(steps, arm, i, j, n, s, list, t) {
    for (i = 1; i <= settings; i++) {
        s = setting[i]
        if (arm_of[s] != arm || steps_of[s] != steps) { continue }
        list[++n] = s
        for (j = n; j > 1 && mean(list[j]) < mean(list[j - 1]); j--) { t = list[j]; list[j] = list[j - 1]; list[j - 1] = t }
    }
    if (n < 2) { return }
    printf "\n%s, %d steps, all settings:\n\n| loss | spread | seeds | setting |\n|---|---|---|---|\n", arm, steps
    for (i = 1; i <= n; i++) {
        s = list[i]
        printf "| %s | %s | %d | %s |\n", mean_text(s), spread(s), runs[s], shown[s]
    }
}

# Data files of the loss curves: tokens in millions, mean over the seeds whose curves are as long as the first; and the arms by rising loss.
function curves(steps, i, j, k, n, s, y, m, file, list, many, t) {
    if (folder == "") { return }
    for (i = 1; i <= arm_count; i++) {
        if (!((arms[i], steps) in best)) { continue }
        s = best[arms[i], steps]
        file = folder "/curve_" steps "_" arms[i]
        for (k = 2; k <= count[s, 1]; k++) {
            y = m = 0
            for (n = 1; n <= runs[s]; n++) { if (count[s, n] == count[s, 1]) { y += val[s, n, k]; m++ } }
            print at[s, 1, k] / 1e6, y / m > file
        }
        close(file)
        list[++many] = arms[i]
        for (j = many; j > 1 && mean(best[list[j], steps]) < mean(best[list[j - 1], steps]); j--) {
            t = list[j]; list[j] = list[j - 1]; list[j - 1] = t
        }
    }
    for (i = 1; i <= many; i++) { print list[i] > (folder "/order_" steps) }
    close(folder "/order_" steps)
}

END {
    choose_best()
    order(lengths, length_count)
    for (i = 1; mode == "best" && i <= arm_count; i++) {
        for (l = length_count; l >= 1 && !((arms[i], lengths[l]) in best); l--) { }
        print arms[i] "\t" options_of[best[arms[i], lengths[l]]]
    }
    if (mode == "best") { exit }
    for (l = length_count; l >= 1; l--) {
        table(lengths[l])
        pairs(lengths[l])
        sensitivity(lengths[l])
        for (i = 1; i <= arm_count; i++) { if ((arms[i], lengths[l]) in best) { grid(lengths[l], arms[i]) } }
        curves(lengths[l])
    }
    for (l = length_count; every && l >= 1; l--) { for (i = 1; i <= arm_count; i++) { listing(lengths[l], arms[i]) } }
}
