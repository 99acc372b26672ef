// reference_codec.h - the maps of quantised optimizer state once more, in double and by their construction: for the dynamic map
// (Dettmers et al. 2022, arXiv 2110.02861) every decade is a list of evenly spaced borders, of which midpoints are taken, and all are
// sorted; nearest codes are found by trying all of them. Oracle of test_codec.h.
#pragma once
#include "reference.h"

typedef enum { MAP_SIGNED8, MAP_UNSIGNED8, MAP_SIGNED4, MAP_UNSIGNED4, MAPS } ReferenceMapKind;
static const char* const reference_map_names[MAPS] = {"8 bits signed", "8 bits unsigned", "4 bits signed", "4 bits unsigned"};

typedef struct {
    double values[256]; // ascending
    int count;
} ReferenceMap;

static int reference_ascending(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static ReferenceMap reference_map(ReferenceMapKind kind) {
    ReferenceMap m;
    m.count = 0;
    if (kind == MAP_UNSIGNED4) {
        while (m.count < 16) {
            m.values[m.count] = (m.count + 1) / 16.0;
            m.count++;
        }
        return m;
    }
    int exponents = kind == MAP_SIGNED4 ? 3 : 7;
    for (int e = 0; e < exponents; e++) {
        int cells = (kind == MAP_UNSIGNED8 ? 2 : 1) * (int)pow(2.0, e);
        for (int k = 0; k < cells; k++) {
            double below = 0.1 + 0.9 * k / cells, above = 0.1 + 0.9 * (k + 1) / cells;
            double value = (below + above) / 2.0 * pow(10.0, e - exponents + 1);
            m.values[m.count++] = value;
            if (kind != MAP_UNSIGNED8) { m.values[m.count++] = -value; }
        }
    }
    m.values[m.count++] = 0.0;
    m.values[m.count++] = 1.0;
    qsort(m.values, (size_t)m.count, sizeof(double), reference_ascending);
    return m;
}

// The value of the map nearest to x; of two as near the greater.
static double reference_nearest(const ReferenceMap* m, double x) {
    double best = m->values[0];
    for (int k = 1; k < m->count; k++) {
        if (fabs(x - m->values[k]) <= fabs(x - best)) { best = m->values[k]; }
    }
    return best;
}

// Each value moves to the nearest of its block; second moments of 8 bits that are not 0 at least to the smallest code.
static void reference_quantise(double* x, size_t n, size_t block, ReferenceMapKind kind) {
    ReferenceMap map = reference_map(kind);
    for (size_t at = 0; at < n; at += block) {
        double most = 0.0;
        for (size_t i = at; i < n && i < at + block; i++) { most = fmax(most, fabs(x[i])); }
        for (size_t i = at; i < n && i < at + block; i++) {
            double value = most > 0.0 ? most * reference_nearest(&map, x[i] / most) : 0.0;
            x[i] = value == 0.0 && kind == MAP_UNSIGNED8 && x[i] > 0.0 ? most * map.values[1] : value;
        }
    }
}

// What AdamW changes.
typedef struct {
    double *w, *m, *v;
} ReferenceMoments;

static ReferenceMoments reference_moments_new(const double* w, size_t n) {
    ReferenceMoments r = {reference_zeros(n), reference_zeros(n), reference_zeros(n)};
    memcpy(r.w, w, n * sizeof(double));
    return r;
}

static void reference_moments_free(ReferenceMoments* r) {
    free(r->w);
    free(r->m);
    free(r->v);
}
