/* Simulated annealing of one pipeline plan: moves and swaps of samples, swaps of a group's slots, judged by exact
   makespans. Built by annealing.py, which gives the order of passes. Costs are of one micro-batch on all stages;
   a forward pass counts one unit of cost, a backward two, and `parts` units make one cost. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int samples, groups, span, expert_span, slots, passes;
    const int32_t *before, *source, *slot, *factor; /* [passes], -1: none; in an order in which sources come first */
    const int64_t *own, *shared, *weight;           /* [samples] */
    int64_t cap, launch;
} Problem;

static uint64_t state;
static uint64_t draw(void) {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static double uniform(void) { return (double)(draw() >> 11) / 9007199254740992.0; }

static int64_t makespan(const Problem *p, const int64_t *times, int64_t *end) {
    int64_t last = 0;
    for (int i = 0; i < p->passes; i++) {
        int64_t ready = p->before[i] < 0 ? 0 : end[p->before[i]];
        if (p->source[i] >= 0 && end[p->source[i]] > ready) ready = end[p->source[i]];
        end[i] = ready + p->factor[i] * times[p->slot[i]];
        if (end[i] > last) last = end[i];
    }
    return last;
}

/* Time of slot `cell` (group * slots + slot): its costliest rank with the rank's even part of the experts' work. */
static int64_t slot_time(const Problem *p, const int64_t *own, const int64_t *shared, int cell) {
    int64_t highest = 0;
    for (int column = 0; column < p->span; column++) {
        int block = cell * (p->span / p->expert_span) + column / p->expert_span;
        int64_t cost = own[cell * p->span + column] + (shared[block] + p->expert_span - 1) / p->expert_span;
        if (cost > highest) highest = cost;
    }
    return highest + p->launch;
}

static int64_t slowest(const int64_t *ends, int groups) {
    int64_t most = 0;
    for (int g = 0; g < groups; g++) if (ends[g] > most) most = ends[g];
    return most;
}

/* `bins`: [samples] (group * slots + slot) * span + column, the start, then the best plan. Returns its time in parts. */
int64_t anneal(const Problem *p, int32_t *bins, int64_t steps, uint64_t seed, double hot, double cold) {
    int cells = p->groups * p->slots, num_bins = cells * p->span;
    int64_t *own = calloc(num_bins, 8), *room = calloc(num_bins, 8), *shared = calloc(num_bins, 8);
    int64_t *times = calloc(cells, 8), *ends = calloc(p->groups, 8), *end = calloc(p->passes, 8);
    int64_t *trial = calloc(2 * p->slots, 8);
    int32_t *count = calloc(num_bins, 4), *best_bins = malloc(p->samples * sizeof(int32_t));
    state = seed;
    for (int b = 0; b < num_bins; b++) room[b] = p->cap;
    for (int i = 0; i < p->samples; i++) {
        own[bins[i]] += p->own[i]; shared[bins[i] / p->expert_span] += p->shared[i];
        room[bins[i]] -= p->weight[i]; count[bins[i]]++;
    }
    for (int c = 0; c < cells; c++) times[c] = slot_time(p, own, shared, c);
    for (int g = 0; g < p->groups; g++) ends[g] = makespan(p, times + g * p->slots, end);
    int64_t now = slowest(ends, p->groups), best = now;
    memcpy(best_bins, bins, p->samples * sizeof(int32_t));
    for (int64_t step = 0; step < steps; step++) {
        double heat = hot * pow(cold / hot, (double)step / steps) * (double)now;
        int kind = draw() % 8;
        if (kind == 0 && p->slots > 1) { /* two slots of the slowest group, or of any */
            int g = draw() % p->groups, a = draw() % p->slots, b = draw() % p->slots;
            if (draw() % 2) for (int h = 0; h < p->groups; h++) if (ends[h] == now) g = h;
            if (a == b) continue;
            memcpy(trial, times + g * p->slots, p->slots * 8);
            int64_t kept = trial[a]; trial[a] = trial[b]; trial[b] = kept;
            int64_t before = ends[g]; ends[g] = makespan(p, trial, end);
            int64_t after = slowest(ends, p->groups);
            if (after > now && uniform() >= exp((double)(now - after) / heat)) { ends[g] = before; continue; }
            memcpy(times + g * p->slots, trial, p->slots * 8);
            int first = (g * p->slots + a) * p->span, second = (g * p->slots + b) * p->span;
            for (int c = 0; c < p->span; c++) {
                int64_t t; int32_t n;
                t = own[first + c]; own[first + c] = own[second + c]; own[second + c] = t;
                t = room[first + c]; room[first + c] = room[second + c]; room[second + c] = t;
                n = count[first + c]; count[first + c] = count[second + c]; count[second + c] = n;
            }
            int blocks = p->span / p->expert_span;
            for (int c = 0; c < blocks; c++) {
                int64_t t = shared[first / p->expert_span + c];
                shared[first / p->expert_span + c] = shared[second / p->expert_span + c];
                shared[second / p->expert_span + c] = t;
            }
            for (int i = 0; i < p->samples; i++) {
                if (bins[i] >= first && bins[i] < first + p->span) bins[i] += second - first;
                else if (bins[i] >= second && bins[i] < second + p->span) bins[i] += first - second;
            }
            now = after;
        } else {
            int i = draw() % p->samples, j = -1, from = bins[i], to;
            if (draw() % 2) /* mostly from the slowest group */
                for (int tries = 0; tries < 8 && ends[from / (p->slots * p->span)] != now; tries++) {
                    i = draw() % p->samples; from = bins[i];
                }
            if (kind < 4) { to = draw() % num_bins; }
            else { j = draw() % p->samples; to = bins[j]; }
            if (draw() % 2 && j < 0) to = from / (p->slots * p->span) * (p->slots * p->span) + draw() % (p->slots * p->span);
            if (to == from || (j < 0 && count[from] == 1)) continue;
            int64_t weight = p->weight[i] - (j < 0 ? 0 : p->weight[j]);
            if (weight > room[to] || -weight > room[from]) continue;
            int64_t cost = p->own[i] - (j < 0 ? 0 : p->own[j]), work = p->shared[i] - (j < 0 ? 0 : p->shared[j]);
            int ga = from / (p->slots * p->span), gb = to / (p->slots * p->span), ca = from / p->span, cb = to / p->span;
            own[from] -= cost; own[to] += cost;
            shared[from / p->expert_span] -= work; shared[to / p->expert_span] += work;
            int64_t ta = times[ca], tb = times[cb], ea = ends[ga], eb = ends[gb];
            times[ca] = slot_time(p, own, shared, ca); times[cb] = slot_time(p, own, shared, cb);
            ends[ga] = makespan(p, times + ga * p->slots, end);
            if (gb != ga) ends[gb] = makespan(p, times + gb * p->slots, end);
            int64_t after = slowest(ends, p->groups);
            if (after > now && uniform() >= exp((double)(now - after) / heat)) {
                own[from] += cost; own[to] -= cost;
                shared[from / p->expert_span] += work; shared[to / p->expert_span] -= work;
                times[cb] = tb; times[ca] = ta; ends[gb] = eb; ends[ga] = ea;
                continue;
            }
            room[from] += weight; room[to] -= weight;
            bins[i] = to;
            if (j < 0) { count[from]--; count[to]++; } else bins[j] = from;
            now = after;
        }
        if (now < best) { best = now; memcpy(best_bins, bins, p->samples * sizeof(int32_t)); }
    }
    memcpy(bins, best_bins, p->samples * sizeof(int32_t));
    free(own); free(room); free(shared); free(times); free(ends); free(end); free(trial); free(count); free(best_bins);
    return best;
}
