/* Attention of each query to the rows that were chosen for it, some rows at a time: what native.py says.
 *
 * Rows lie anywhere, so some of them are copied side by side, widened to float32, and stay in the cache while all heads
 * of a task pass. The LANES of a vector are `width` heads, each with `share` numbers beside each other: with AVX-512 four
 * or eight heads fill a vector too. As many numbers of a key are broadcast against them, and products of several keys
 * are folded into one vector, which then has `width` scores of `share` keys. The softmax is the running one (Milakov &
 * Gimelshein 2018, Online normalizer calculation for softmax): what was added up so far shrinks whenever a larger score
 * comes.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined __F16C__ || defined __AVX512F__
#include <immintrin.h>
#endif

#define WIDE 2   /* vectors of heads of a task */
#define ROWS 32  /* at a time */
#define LINE 64
#define COLUMNS 64 /* a value is filled up to a multiple of so many */
#define TILE (LANES == 16 ? 16 : 8) /* sums that fit into registers */
#define SIDE (TILE / 4) /* heads, by 4 vectors of a value */
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *numbers; /* [rows there are, groups, size] */
    int64_t kind, row, group, size; /* strides in numbers */
} Table;

typedef struct {
    const float *queries; /* [queries, groups, vectors, dim / share, width, share], scaled */
    const float *sinks;   /* [groups, vectors, width]: -infinity for none */
    const int64_t *ids;   /* [queries, groups or 1, k]; -1 for none */
    float *out;           /* [queries, groups, vectors, width, padded]: a value is filled up to whole vectors */
    float *lse;           /* [queries, groups, vectors, width] */
    int64_t count, groups, heads, vectors, width, k, choices; /* heads: of a group */
    int64_t dim, padded, inside, threads; /* dim: of a key, filled up; inside: whether values are in the keys */
} Work;

static void widen(const Table *table, int64_t row, int64_t group, float *out) {
    int64_t at = row * table->row + group * table->group, i = 0;
    const uint16_t *halves = (const uint16_t *)table->numbers + at;
    if (table->kind == FLOAT32) {
        const float *from = (const float *)table->numbers + at;
        for (; i + LANES <= table->size; i += LANES) *(Vector *)(out + i) = *(const Vector *)(from + i);
        for (; i < table->size; i++) out[i] = from[i];
    } else if (table->kind == BFLOAT16) {
#pragma omp simd
        for (i = 0; i < table->size; i++) {
            uint32_t bits = (uint32_t)halves[i] << 16;
            memcpy(out + i, &bits, sizeof bits);
        }
    } else {
#ifdef __F16C__
        for (; i + 8 <= table->size; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(halves + i))));
        for (; i < table->size; i++) out[i] = _cvtsh_ss(halves[i]);
#endif
    }
}

/* Rows lie anywhere, so the processor cannot know what comes next. */
static void prefetch(const Table *table, int64_t row, int64_t group) {
    int64_t size = table->kind == FLOAT32 ? 4 : 2;
    const char *start = (const char *)table->numbers + (row * table->row + group * table->group) * size;
    for (int64_t byte = 0; byte < table->size * size; byte += LINE) __builtin_prefetch(start + byte);
}

static Vector larger(Vector a, Vector b) {
    Mask more = (Mask)(b > a);
    return (Vector)(((Mask)a & ~more) | ((Mask)b & more));
}

#if LANES == 16
/* The lanes of x, `by` places on. Only 4 and 8 are needed. */
INLINE Vector turned(Vector x, const int by) {
    return by == 4 ? __builtin_shufflevector(x, x, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3)
                   : __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}

/* Sums of neighbouring lanes, of two vectors in one. */
static Vector folded(Vector a, Vector b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#endif

/* e to the power of x, which is not above 0: 2 to a whole number, times a polynomial for the rest. */
static Vector power(Vector x) {
    const Vector low = (Vector){0} - 87;
    Mask there = ~(Mask)(x < low); /* what is no number stays none */
    x = (Vector)(((Mask)x & there) | ((Mask)low & ~there));
    Mask whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Mask);
    Vector n = __builtin_convertvector(whole, Vector), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vector sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = (sum * r + 1.0f) * r + 1.0f;
    return (Vector)((Mask)(sum * (Vector)((whole + 127) << 23)) & there);
}

/* `share` numbers of a key in all lanes, again and again; with AVX-512 alone there may be several. */
INLINE Vector repeated(const float *key, const int share) {
#if LANES == 16
    if (share == 2) return (Vector)_mm512_broadcastsd_pd(_mm_loadu_pd((const double *)(const void *)key));
    if (share == 4) return (Vector)_mm512_broadcast_f32x4(_mm_loadu_ps(key));
#endif
    return *key - (Vector){0};
}

/* The products of ROWS keys with the queries of one vector. */
INLINE void multiply(const float *keys, int64_t dim, const Vector *queries, const int share, Vector *scores) {
    for (int key = 0; key < ROWS; key += TILE, keys += TILE * dim) {
        Vector products[TILE] = {{0}};
        const float *low = keys, *high = keys + TILE / 2 * dim; /* few registers for addresses */
        for (int64_t d = 0; d < dim / share; d++, low += share, high += share) {
#pragma GCC unroll 8
            for (int j = 0; j < TILE / 2; j++) {
                products[j] += queries[d] * repeated(low + j * dim, share);
                products[j + TILE / 2] += queries[d] * repeated(high + j * dim, share);
            }
        }
#if LANES == 16
#pragma GCC unroll 8
        for (int j = 0; j < TILE / 2 && share > 1; j++) products[j] = folded(products[2 * j], products[2 * j + 1]);
#pragma GCC unroll 4
        for (int j = 0; j < TILE / 4 && share > 2; j++) products[j] = folded(products[2 * j], products[2 * j + 1]);
#endif
#pragma GCC unroll 16
        for (int j = 0; j < TILE / share; j++) scores[key / share + j] = products[j];
    }
}

/* Adds `count` values, weighted, to what shrinks, for the first `heads` of a vector. */
INLINE void add(const Vector *weights, const float *shrink, const float *values, int64_t stride, int64_t count,
                const int width, int64_t padded, int64_t heads, float *out) {
    for (int head = 0; head < heads; head += SIDE)
        for (int64_t at = 0; at < padded; at += 4 * LANES) {
            Vector sums[SIDE][4];
            for (int h = 0; h < SIDE; h++)
                for (int v = 0; v < 4; v++)
                    sums[h][v] = *(const Vector *)(out + (head + h) * padded + at + v * LANES) * shrink[head + h];
            const float *value = values + at, *weight = (const float *)weights + head;
            for (int64_t j = 0; j < count; j++, value += stride, weight += width) {
#pragma GCC unroll 4
                for (int h = 0; h < SIDE; h++) {
#pragma GCC unroll 4
                    for (int v = 0; v < 4; v++) sums[h][v] += *(const Vector *)(value + v * LANES) * weight[h];
                }
            }
            for (int h = 0; h < SIDE; h++)
                for (int v = 0; v < 4; v++) *(Vector *)(out + (head + h) * padded + at + v * LANES) = sums[h][v];
        }
}

/* Some heads of one query: WIDE vectors from `first` on. */
INLINE void attend(const Work *work, const Table *keys, const Table *values, int64_t query, int64_t group,
                   int64_t first, const int width) {
    const int share = LANES / width;
    int64_t dim = work->dim, padded = work->padded;
    int64_t wide = work->vectors - first < WIDE ? work->vectors - first : WIDE;
    int64_t place = (query * work->groups + group) * work->vectors + first;
    const int64_t *ids = work->ids + (query * work->choices + (work->choices > 1 ? group : 0)) * work->k;
    const Vector *queries = (const Vector *)(work->queries + place * width * dim);
    const float *sinks = work->sinks + (group * work->vectors + first) * width;
    float *out = work->out + place * width * padded;
    float near[ROWS * dim + COLUMNS], far[work->inside ? 1 : ROWS * padded];
    Vector most[WIDE], total[WIDE], scores[ROWS];
    for (int64_t v = 0; v < wide; v++)
        for (int lane = 0; lane < LANES; lane++) {
            most[v][lane] = sinks[v * width + lane % width];
            total[v][lane] = lane < width && most[v][lane] > -INFINITY;
        }
    memset(out, 0, (size_t)(wide * width * padded) * sizeof *out);
    memset(near, 0, sizeof near);
    if (!work->inside) memset(far, 0, sizeof far);
    for (int64_t at = 0; at < work->k;) {
        int64_t count = 0;
        for (; at < work->k && count < ROWS; at++) {
            if (at + ROWS < work->k && ids[at + ROWS] >= 0) {
                prefetch(keys, ids[at + ROWS], group);
                if (!work->inside) prefetch(values, ids[at + ROWS], group);
            }
            if (ids[at] < 0) continue;
            widen(keys, ids[at], group, near + count * dim);
            if (!work->inside) widen(values, ids[at], group, far + count * padded);
            count++;
        }
        for (int64_t v = 0; count && v < wide; v++) {
            Vector before = most[v], shrink, base;
            multiply(near, dim, queries + v * dim / share, share, scores);
            for (int64_t i = count * width; i < ROWS * width; i++) ((float *)scores)[i] = -INFINITY; /* of earlier rows */
            for (int j = 0; j < ROWS / share; j++) most[v] = larger(most[v], scores[j]);
#if LANES == 16
            if (share > 2) most[v] = larger(most[v], turned(most[v], 4));
            if (share > 1) most[v] = larger(most[v], turned(most[v], 8));
#endif
            Mask none = (Mask)(most[v] == -INFINITY);
            base = (Vector)((Mask)most[v] & ~none); /* all scores are -infinity: they weigh nothing */
            shrink = power(before - base);
            total[v] *= shrink;
            for (int j = 0; j < ROWS / share; j++) total[v] += scores[j] = power(scores[j] - base);
            add(scores, (const float *)&shrink, work->inside ? near : far, work->inside ? dim : padded, count, width,
                padded, work->heads - (first + v) * width < width ? work->heads - (first + v) * width : width,
                out + v * width * padded);
        }
    }
    for (int64_t v = 0; v < wide; v++)
        for (int head = 0; head < width; head++) {
            float sum = 0, *value = out + (v * width + head) * padded;
            for (int lane = head; lane < LANES; lane += width) sum += total[v][lane];
            work->lse[(place + v) * width + head] = sum == 0 ? -INFINITY : most[v][head] + logf(sum);
            for (int64_t d = 0; d < padded; d++) value[d] = sum == 0 ? 0 : value[d] / sum;
        }
}

void memstore_attend(const Work *work, const Table *keys, const Table *values) {
    int64_t parts = (work->vectors + WIDE - 1) / WIDE, tasks = work->count * work->groups * parts;
#pragma omp parallel for num_threads((int)work->threads)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t query = task / parts / work->groups, group = task / parts % work->groups, first = task % parts * WIDE;
#if LANES == 16
        if (work->width == 4) attend(work, keys, values, query, group, first, 4);
        if (work->width == 8) attend(work, keys, values, query, group, first, 8);
#endif
        if (work->width == LANES) attend(work, keys, values, query, group, first, LANES);
    }
}
