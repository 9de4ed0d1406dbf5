/* Attention of each query to the rows that were chosen for it, some rows at a time: what native.py says.
 *
 * Rows lie anywhere, so some of them are copied side by side, widened to float32, and stay in the cache while all heads
 * of a task pass. Scores have one head in each lane of a vector: a number of a key is broadcast against a number of LANES
 * queries. The softmax is the running one (Milakov & Gimelshein 2018, Online normalizer calculation for softmax): what
 * was added up so far shrinks whenever a larger score comes.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define WIDE 2   /* vectors of heads of a task */
#define ROWS 32  /* at a time */
#define LINE 64
#define COLUMNS 64 /* a value is filled up to a multiple of so many */
#define TILE (LANES == 16 ? 16 : 8) /* sums that fit into registers */
#define SIDE (TILE / 4) /* heads, by 4 vectors of a value */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *numbers; /* [rows there are, groups, size] */
    int64_t kind, row, group, size; /* strides in numbers */
} Table;

typedef struct {
    const float *queries; /* [queries, groups, vectors, dim, LANES], scaled */
    const float *sinks;   /* [groups, vectors, LANES]: -infinity for none */
    const int64_t *ids;   /* [queries, groups or 1, k]; -1 for none */
    float *out;           /* [queries, groups, vectors, LANES, padded]: a value is filled up to whole vectors */
    float *lse;           /* [queries, groups, vectors, LANES] */
    int64_t count, groups, heads, vectors, k, choices; /* heads: of a group */
    int64_t padded, inside, threads; /* inside: whether values are in the keys */
} Work;

static void widen(const Table *table, int64_t row, int64_t group, float *out) {
    int64_t at = row * table->row + group * table->group, i = 0;
    const uint16_t *halves = (const uint16_t *)table->numbers + at;
    if (table->kind == FLOAT32) {
        memcpy(out, (const float *)table->numbers + at, (size_t)table->size * sizeof *out);
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

/* The products of ROWS keys with the queries of one vector. */
static void multiply(const float *keys, int64_t dim, const Vector *queries, Vector *scores) {
    for (int key = 0; key < ROWS; key += TILE, keys += TILE * dim) {
        Vector products[TILE] = {{0}};
        const float *low = keys, *high = keys + TILE / 2 * dim; /* few registers for addresses */
        for (int64_t d = 0; d < dim; d++, low++, high++) {
#pragma GCC unroll 8
            for (int j = 0; j < TILE / 2; j++) {
                products[j] += queries[d] * low[j * dim];
                products[j + TILE / 2] += queries[d] * high[j * dim];
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < TILE; j++) scores[key + j] = products[j];
    }
}

/* Adds `count` values, weighted, to what shrinks, for the first `heads` of a vector. */
static void add(const Vector *weights, const float *shrink, const float *values, int64_t stride, int64_t count,
                int64_t padded, int64_t heads, float *out) {
    for (int head = 0; head < heads; head += SIDE)
        for (int64_t at = 0; at < padded; at += 4 * LANES) {
            Vector sums[SIDE][4];
            for (int h = 0; h < SIDE; h++)
                for (int v = 0; v < 4; v++)
                    sums[h][v] = *(const Vector *)(out + (head + h) * padded + at + v * LANES) * shrink[head + h];
            const float *value = values + at, *weight = (const float *)weights + head;
            for (int64_t j = 0; j < count; j++, value += stride, weight += LANES) {
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
static void attend(const Work *work, const Table *keys, const Table *values, int64_t query, int64_t group,
                   int64_t first) {
    int64_t dim = keys->size, padded = work->padded;
    int64_t wide = work->vectors - first < WIDE ? work->vectors - first : WIDE;
    int64_t place = (query * work->groups + group) * work->vectors + first;
    const int64_t *ids = work->ids + (query * work->choices + (work->choices > 1 ? group : 0)) * work->k;
    const Vector *queries = (const Vector *)(work->queries + place * dim * LANES);
    const Vector *sinks = (const Vector *)(work->sinks + (group * work->vectors + first) * LANES);
    float *out = work->out + place * LANES * padded;
    float near[ROWS * dim + COLUMNS], far[work->inside ? 1 : ROWS * padded];
    Vector most[WIDE], total[WIDE], scores[ROWS];
    for (int64_t v = 0; v < wide; v++) {
        most[v] = sinks[v];
        for (int lane = 0; lane < LANES; lane++) total[v][lane] = most[v][lane] > -INFINITY;
    }
    memset(out, 0, (size_t)(wide * LANES * padded) * sizeof *out);
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
            multiply(near, dim, queries + v * dim, scores);
            for (int64_t j = 0; j < count; j++) most[v] = larger(most[v], scores[j]);
            Mask none = (Mask)(most[v] == -INFINITY);
            base = (Vector)((Mask)most[v] & ~none); /* all scores are -infinity: they weigh nothing */
            shrink = power(before - base);
            total[v] *= shrink;
            for (int64_t j = 0; j < count; j++) total[v] += scores[j] = power(scores[j] - base);
            add(scores, (const float *)&shrink, work->inside ? near : far, work->inside ? dim : padded, count, padded,
                work->heads - (first + v) * LANES < LANES ? work->heads - (first + v) * LANES : LANES, out + v * LANES * padded);
        }
    }
    for (int64_t v = 0; v < wide; v++)
        for (int lane = 0; lane < LANES; lane++) {
            float sum = total[v][lane], *value = out + (v * LANES + lane) * padded;
            work->lse[(place + v) * LANES + lane] = sum == 0 ? -INFINITY : most[v][lane] + logf(sum);
            for (int64_t d = 0; d < padded; d++) value[d] = sum == 0 ? 0 : value[d] / sum;
        }
}

void memstore_attend(const Work *work, const Table *keys, const Table *values) {
    int64_t parts = (work->vectors + WIDE - 1) / WIDE, tasks = work->count * work->groups * parts;
#pragma omp parallel for num_threads((int)work->threads)
    for (int64_t task = 0; task < tasks; task++)
        attend(work, keys, values, task / parts / work->groups, task / parts % work->groups, task % parts * WIDE);
}
