/* The best keys of an index of heads for each query, in one pass over the keys: what native.py says.
 *
 * A vector holds one number for each of 16 pairs of a query and a head, and a number of a key is broadcast against it, so
 * keys are multiplied as they lie in memory, and what was multiplied is added over heads in registers. Scores of a panel
 * of keys are written down, those above the smallest that can still be chosen become candidates, and candidates are
 * thinned out to the best k when there is no room for more: nobody sorts all scores, or has them all in memory.
 *
 * A candidate is one number of 64 bits, the score above and the position, counted down, below: no two are equal, and of
 * equal scores the smaller position is the larger number. Each score is computed in the same order wherever its key lies
 * in a slice, so that the choice does not depend on slices.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define LANES 16
#define RUN 16   /* keys that are multiplied side by side */
#define RUNS 4   /* that stay in the first cache while all queries pass */
#define PASS (RUN * RUNS)
#define LINE 64
#define AHEAD 4096 /* bytes: the processor reads ahead by itself, but not across pages */
#ifdef __AVX512F__
#define TILE 16 /* sums that fit into registers */
#else
#define TILE 4
#endif

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const char *keys;     /* [count, dim], `stride` numbers from one to the next */
    const float *queries; /* [vectors, dim, LANES] */
    const float *weights; /* [vectors, LANES] */
    const int32_t *there; /* [vectors, LANES]: -1 for a head, 0 for a lane that has none */
    const int64_t *limit; /* [rows] */
    float *scores;        /* [rows, panel] */
    float *least;         /* [rows]: a score must be larger to be a candidate */
    uint64_t *candidates; /* [rows, capacity] */
    int64_t *counts;      /* [rows] */
    int64_t kind, count, stride, first; /* kind: of the numbers of a key; first: the position of the first key */
    int64_t dim, rows;    /* rows: queries */
    int64_t vectors;      /* of a query, or 1 where a vector has several queries */
    int64_t lanes;        /* of a query in a vector, a power of 2 */
    int64_t relu, block, k, capacity, panel, threads;
} Scan;

/* ---- candidates ---- */

static uint64_t packed(float score, int64_t position) {
    uint32_t bits;
    score += 0.0f; /* there are two zeros */
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xFFFFFFFFu - (uint32_t)position);
}

static float score_of(uint64_t candidate) {
    uint32_t bits = (uint32_t)(candidate >> 32);
    float score;
    bits = bits >> 31 ? bits & 0x7FFFFFFFu : ~bits;
    memcpy(&score, &bits, sizeof score);
    return score;
}

/* Brings the largest `k` of `n` different numbers to the front; in order, where `sorted`, which wants all of them. */
static void largest(uint64_t *a, int64_t n, int64_t k, int sorted) {
    while (n > 1 && k > 0 && (sorted || k < n)) {
        uint64_t x = a[0], y = a[n / 2], z = a[n - 1];
        uint64_t middle = x < y ? (y < z ? y : x < z ? z : x) : (x < z ? x : y < z ? z : y);
        int64_t low = 0, high = n - 1;
        for (;;) {
            while (a[low] > middle) low++;
            while (a[high] < middle) high--;
            if (low >= high) break;
            uint64_t other = a[low];
            a[low++] = a[high];
            a[high--] = other;
        }
        if (k <= low) {
            n = low;
        } else {
            if (sorted) largest(a, low, low, 1);
            low += low == high; /* where both stopped is the middle one itself */
            a += low, n -= low, k -= low;
        }
    }
}

static void choose(const Scan *scan, int64_t row, int64_t start, int64_t stop) {
    float *scores = scan->scores + row * scan->panel, least = scan->least[row];
    uint64_t *candidates = scan->candidates + row * scan->capacity;
    int64_t count = scan->counts[row], position = scan->first + start, n = scan->limit[row] - position;
    n = n < stop - start ? n : stop - start;
    if (scan->block > 1) {
        int64_t keys = n;
        n = (keys + scan->block - 1) / scan->block, position /= scan->block;
        for (int64_t block = 0; block < n; block++) {
            int64_t end = (block + 1) * scan->block;
            float most = -INFINITY;
            for (int64_t i = block * scan->block; i < (end < keys ? end : keys); i++)
                most = scores[i] > most ? scores[i] : most;
            scores[block] = most;
        }
    }
    for (int64_t some = 0; some < n; some += LANES) {
        int64_t end = some + LANES < n ? some + LANES : n;
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = some; i < end; i++) any |= scores[i] > least;
        if (!any) continue;
        for (int64_t i = some; i < end; i++) {
            if (!(scores[i] > least)) continue; /* nor if it is no number */
            candidates[count++] = packed(scores[i], position + i);
            if (count < scan->capacity) continue;
            largest(candidates, count, scan->k, 0);
            count = scan->k;
            uint64_t last = candidates[0];
            for (int64_t c = 1; c < count; c++) last = candidates[c] < last ? candidates[c] : last;
            least = score_of(last);
        }
    }
    scan->counts[row] = count;
    scan->least[row] = least;
}

/* ---- scores ---- */

static void widen(const Scan *scan, int64_t first, int64_t count, float *out) {
    for (int64_t key = first; key < first + count; key++, out += scan->dim) {
        const float *floats = (const float *)(const void *)scan->keys + key * scan->stride;
        const uint16_t *halves = (const uint16_t *)(const void *)scan->keys + key * scan->stride;
        int64_t d = 0;
        if (scan->kind == FLOAT32) {
            memcpy(out, floats, (size_t)scan->dim * sizeof *out);
        } else if (scan->kind == BFLOAT16) {
#pragma omp simd
            for (d = 0; d < scan->dim; d++) {
                uint32_t bits = (uint32_t)halves[d] << 16;
                memcpy(out + d, &bits, sizeof bits);
            }
        } else {
#ifdef __F16C__
            for (; d + 8 <= scan->dim; d += 8)
                _mm256_storeu_ps(out + d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(halves + d))));
            for (; d < scan->dim; d++) out[d] = _cvtsh_ss(halves[d]);
#endif
        }
    }
    memset(out, 0, (size_t)((RUN - count) * scan->dim) * sizeof *out);
}

/* The products of RUN keys with the queries of `wide` vectors from `vector` on (a constant, 1 or 2), added over heads:
 * those of vector w to `sums[w * apart]`. */
static inline __attribute__((always_inline)) void multiply(
    const Scan *scan, const float *keys, int64_t stride, int64_t vector, const int wide, Vector *sums, int64_t apart) {
    int64_t dim = scan->dim;
    const Vector *first = (const Vector *)(scan->queries + vector * dim * LANES), *second = first + (wide - 1) * dim;
    const int tile = TILE / wide;
    for (int key = 0; key < RUN; key += tile, keys += tile * stride) {
        Vector products[2][TILE] = {{{0}}};
        const float *low = keys, *high = keys + tile / 2 * stride; /* few registers for addresses */
        for (int64_t d = 0; d < dim; d++, low++, high++) {
#pragma GCC unroll 8
            for (int j = 0; j < tile / 2; j++) {
                products[0][j] += first[d] * low[j * stride];
                products[0][j + tile / 2] += first[d] * high[j * stride];
                if (wide == 1) continue;
                products[1][j] += second[d] * low[j * stride];
                products[1][j + tile / 2] += second[d] * high[j * stride];
            }
        }
        for (int w = 0; w < wide; w++) {
            Vector weights = *(const Vector *)(scan->weights + (vector + w) * LANES);
            Mask there = *(const Mask *)(scan->there + (vector + w) * LANES);
#pragma GCC unroll 16
            for (int j = 0; j < tile; j++) {
                Vector x = products[w][j];
                if (scan->relu) x = (Vector)((Mask)x & ~(Mask)(x < 0.0f)); /* what is no number stays none */
                sums[w * apart + key + j] += (Vector)((Mask)(x * weights) & there);
            }
        }
    }
}

/* Sums of neighbouring lanes, of two vectors in one. */
static Vector folded(Vector a, Vector b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* From sums over some heads in each lane to the scores of `count` keys, at most RUN. */
static void finish(const Scan *scan, Vector *sums, int64_t at, int64_t count, int64_t group) {
    int64_t queries = LANES / scan->lanes, row = group * queries;
    for (int64_t lanes = scan->lanes, left = RUN; lanes > 1; lanes /= 2, left /= 2)
        for (int64_t j = 0; j < left / 2; j++) sums[j] = folded(sums[2 * j], sums[2 * j + 1]);
    const float *found = (const float *)sums; /* [RUN, queries] */
    for (int64_t query = 0; query < queries && row + query < scan->rows; query++)
        for (int64_t j = 0; j < count; j++)
            scan->scores[(row + query) * scan->panel + at + j] = found[j * queries + query];
}

/* The scores of `count` keys, at most RUN, for `groups` of queries (1 or 2), each of which has vectors of its own. */
static void score(const Scan *scan, const float *keys, int64_t stride, int64_t at, int64_t count, int64_t group,
                  int64_t groups) {
    Vector sums[2 * RUN] = {{0}};
    int64_t first = group * scan->vectors;
    if (scan->vectors == 1 && groups == 2) {
        multiply(scan, keys, stride, first, 2, sums, RUN);
    } else {
        for (int64_t g = 0; g < groups; g++, first += scan->vectors)
            for (int64_t v = 0; v < scan->vectors; v += 2)
                if (v + 1 < scan->vectors)
                    multiply(scan, keys, stride, first + v, 2, sums + g * RUN, 0);
                else
                    multiply(scan, keys, stride, first + v, 1, sums + g * RUN, 0);
    }
    for (int64_t g = 0; g < groups; g++) finish(scan, sums + g * RUN, at, count, group + g);
}

/* The keys from `first` to before `stop`, at most PASS of them, for all queries. The panel begins at `start`. */
static void score_pass(const Scan *scan, int64_t start, int64_t first, int64_t stop) {
    float room[PASS * scan->dim];
    int64_t size = scan->kind == FLOAT32 ? 4 : 2, queries = LANES / scan->lanes;
    int64_t groups = (scan->rows + queries - 1) / queries;
    for (int64_t group = 0; group < groups; group += 2)
        for (int64_t key = first; key < stop; key += RUN) {
            int64_t count = stop - key < RUN ? stop - key : RUN, stride = scan->dim;
            const char *there = scan->keys + key * scan->stride * size;
            float *wide = room + (key - first) * scan->dim;
            if (scan->kind == FLOAT32 && count == RUN)
                wide = (float *)(uintptr_t)there, stride = scan->stride;
            else if (!group)
                widen(scan, key, count, wide);
            for (int64_t line = 0; !group && line < RUN * scan->stride * size; line += LINE)
                __builtin_prefetch(there + AHEAD + line);
            score(scan, wide, stride, key - start, count, group, group + 1 < groups ? 2 : 1);
        }
}

/* All keys of a chunk. The panel is a multiple of the block. */
void memstore_scan(const Scan *scan) {
    int64_t seen = 0;
    for (int64_t row = 0; row < scan->rows; row++) {
        int64_t sees = scan->limit[row] - scan->first;
        seen = sees > seen ? sees : seen;
    }
    seen = seen < scan->count ? seen : scan->count;
    for (int64_t start = 0; start < seen; start += scan->panel) {
        int64_t stop = start + scan->panel < seen ? start + scan->panel : seen;
#pragma omp parallel for num_threads((int)scan->threads)
        for (int64_t first = start; first < stop; first += PASS)
            score_pass(scan, start, first, first + PASS < stop ? first + PASS : stop);
#pragma omp parallel for num_threads((int)scan->threads)
        for (int64_t row = 0; row < scan->rows; row++) choose(scan, row, start, stop);
    }
}

/* The best of all candidates, in order, to `ids` and `scores` [rows, k], which are filled with -1 and -infinity. */
void memstore_chosen(const Scan *scan, int64_t *ids, float *scores) {
    for (int64_t row = 0; row < scan->rows; row++) {
        uint64_t *candidates = scan->candidates + row * scan->capacity;
        int64_t count = scan->counts[row], k = count < scan->k ? count : scan->k;
        largest(candidates, count, k, 0);
        largest(candidates, k, k, 1);
        for (int64_t i = 0; i < k; i++) {
            ids[row * scan->k + i] = 0xFFFFFFFFu - (uint32_t)candidates[i];
            scores[row * scan->k + i] = score_of(candidates[i]);
        }
    }
}
