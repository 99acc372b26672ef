// owners.h - which rank owns which unit: the largest first, each to the rank that holds least so far. Bytes decide, since they are
// memory and traffic; equal sizes go round in layer order, so that the matrices of one layer spread over ranks and one layer's exchange
// keeps all links busy. Only this map depends on the number of ranks. More ranks than units is legal: some then own nothing.
#pragma once
#include "../kernels/params.h"

#define OWNERS_RANGE_ALIGN 32 // elements: ranges begin at multiples

typedef struct {
    size_t count;
    int layer;
    size_t unit;
} OwnerItem;

static int owner_item_order(const void* x, const void* y) {
    const OwnerItem *a = (const OwnerItem*)x, *b = (const OwnerItem*)y;
    if (a->count != b->count) { return a->count > b->count ? -1 : 1; }
    if (a->layer != b->layer) { return a->layer < b->layer ? -1 : 1; }
    return a->unit < b->unit ? -1 : a->unit > b->unit;
}

// owner: (unit_count), rank of each unit; loads: (ranks), elements that each owns.
void owners_assign(const ParamTable* table, int ranks, int* owner, size_t* loads) {
    OwnerItem* items = (OwnerItem*)need(malloc(max_size(1, table->unit_count) * sizeof(OwnerItem)));
    for (size_t u = 0; u < table->unit_count; u++) {
        OwnerItem item = {table->units[u].count, table->units[u].layer, u};
        items[u] = item;
    }
    qsort(items, table->unit_count, sizeof(OwnerItem), owner_item_order);
    memset(loads, 0, (size_t)ranks * sizeof(size_t));
    for (size_t i = 0; i < table->unit_count; i++) {
        int best = 0;
        for (int r = 1; r < ranks; r++) { best = loads[r] < loads[best] ? r : best; }
        owner[items[i].unit] = best;
        loads[best] += items[i].count;
    }
    free(items);
}

// Whether a group's exchange between owners and all ranks goes by ranges: the group's elements, cut into one equal range a rank, are
// added up (or passed on) by the rank of the range and moved from there to their owner (or from the owner there). That sends 1/ranks
// more, but no owner of a large matrix has to serve everyone alone. largest, total: elements of the busiest owner, and of all.
static inline bool owners_by_ranges(size_t largest, size_t total, int ranks) {
    double P = ranks, direct = fmax((P - 1.0) * (double)largest, (P - 1.0) / P * (double)total);
    return (P - 1.0) / P * (double)(total + largest) < 0.7 * direct; // more bytes and a second exchange must be worth it
}

// First element of rank r's range of a group of n elements; r = ranks gives n.
static inline size_t owners_range(size_t n, int ranks, int r) {
    return r == ranks ? n : n / (size_t)ranks * (size_t)r / OWNERS_RANGE_ALIGN * OWNERS_RANGE_ALIGN;
}

// Group of a tensor: 0 outside the layers, 1 + l in layer l. A group's exchange starts when its gradients are complete.
static inline size_t owners_group(const ParamTable* table, const Unit* unit) {
    return table->tensors[unit->tensor].in_layers ? 1 + (size_t)unit->layer : 0;
}

static inline size_t owners_layers(const ParamTable* table) {
    size_t layers = 0;
    for (size_t u = 0; u < table->unit_count; u++) { layers = max_size(layers, owners_group(table, &table->units[u])); }
    return layers;
}

// Which groups go by ranges from stage 1 on, because some owner has too much of them; out: (1 + layers).
static inline void owners_groups_by_ranges(const ParamTable* table, const int* owner, int ranks, bool* out) {
    size_t groups = 1 + owners_layers(table), *loads = (size_t*)need(malloc((size_t)ranks * sizeof(size_t)));
    for (size_t g = 0; g < groups; g++) {
        size_t total = 0, largest = 0;
        memset(loads, 0, (size_t)ranks * sizeof(size_t));
        for (size_t u = 0; u < table->unit_count; u++) {
            if (owners_group(table, &table->units[u]) != g) { continue; }
            loads[owner[u]] += table->units[u].count;
            total += table->units[u].count;
            largest = max_size(largest, loads[owner[u]]);
        }
        out[g] = owners_by_ranges(largest, total, ranks);
    }
    free(loads);
}

// Multiplications of one Newton-Schulz iteration on a rows x cols matrix, for the balance of orthogonalising optimizers: with
// m = min(rows, cols), 2 m^2 max(rows, cols) + m^3 (Jordan et al. 2024, Muon).
static inline double owners_matrix_work(const Unit* unit) {
    double small = (double)min_size(unit->rows, unit->cols), large = (double)max_size(unit->rows, unit->cols);
    return 2.0 * small * small * large + small * small * small;
}

// Largest share over mean share: of elements, and of matrix work. 1 is perfect.
void owners_balance(const ParamTable* table, int ranks, const int* owner, double* elements, double* work) {
    double *load = (double*)need(calloc(2 * (size_t)ranks, sizeof(double))), most[2] = {0, 0}, all[2] = {0, 0};
    for (size_t u = 0; u < table->unit_count; u++) {
        const Unit* unit = &table->units[u];
        bool matrix = table->tensors[unit->tensor].role == ROLE_MATRIX;
        double cost[2] = {(double)unit->count, matrix ? owners_matrix_work(unit) : 0.0};
        for (int k = 0; k < 2; k++) {
            double* at = &load[2 * owner[u] + k];
            *at += cost[k];
            all[k] += cost[k];
            most[k] = *at > most[k] ? *at : most[k];
        }
    }
    *elements = all[0] > 0 ? most[0] * ranks / all[0] : 1.0;
    *work = all[1] > 0 ? most[1] * ranks / all[1] : 1.0;
    free(load);
}
