/* HiLS attention forward, in float32: what native.py says.
 *
 * Keys of a block are packed once, transposed, [dim][lanes]: a vector holds one number of LANES keys, so scores of a few
 * queries come from broadcasts and need no sums across a vector. Values lie as they are: a vector holds LANES numbers of
 * one. A few queries are multiplied at a time, as many sums as fit into registers.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#define ROWS 6
#else
#define LANES 8
#define ROWS 2
#endif
#define WIDE 4 /* vectors of sums a query: ROWS * WIDE of them stay in registers */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t whole __attribute__((vector_size(LANES * 4)));

typedef struct {
    int64_t groups, heads;    /* B * G pairs of keys and values, and query heads of each */
    int64_t queries, dim;     /* of each head */
    int64_t blocks, size;     /* of keys, the landmark counted */
    int64_t lanes;            /* size, up to a multiple of LANES */
    int64_t top_k;
    int64_t window, first;    /* the place of the first key of the window */
    int64_t places;           /* keys of the window */
    int64_t value_block, value_head; /* numbers from a block of values, and from a head of them, to the next */
    int64_t threads;
    float scale;              /* of keys, as they are packed */
} Sizes;

#define FEW static inline __attribute__((always_inline))

FEW vec splat(float x) { return (vec){0} + x; }
FEW vec load(const float *from) { return *(const loose *)from; }
FEW void store(float *to, vec x) { *(loose *)to = x; }

/* exp(x) for x <= 0, to two roundings; 0 from -87 on. */
FEW vec exponential(vec x) {
    whole none = x < splat(-87.0f);
    x = (vec)((whole)x & ~none);
    vec n = (x * splat(1.44269504088896341f) + splat(12582912.0f)) - splat(12582912.0f);
    vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    whole grown = (whole)p + (__builtin_convertvector(n, whole) << 23);
    return (vec)(grown & ~none);
}

FEW vec larger(vec x, vec y) {
    whole more = x > y;
    return (vec)(((whole)x & more) | ((whole)y & ~more));
}

#ifdef __AVX512F__
FEW float highest(vec x) { return _mm512_reduce_max_ps((__m512)x); }
FEW float total(vec x) { return _mm512_reduce_add_ps((__m512)x); }
#else
FEW float highest(vec x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}
FEW float total(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}
#endif

/* rows x many sums of left[row][i] * right[i][lane], i < length, added to or put at out[row]; rows and wide constant. */
FEW void product(
    const float *const *left, const float *right, long stride, long length, float *const *out, const int rows,
    const int wide, const int add) {
    vec sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < wide; w++) sums[r][w] = add ? load(out[r] + w * LANES) : splat(0);
    for (long i = 0; i < length; i++) {
        vec line[WIDE];
        for (int w = 0; w < wide; w++) line[w] = load(right + i * stride + w * LANES);
        for (int r = 0; r < rows; r++) {
            vec x = splat(left[r][i]);
            for (int w = 0; w < wide; w++) sums[r][w] += x * line[w];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < wide; w++) store(out[r] + w * LANES, sums[r][w]);
}

/* The same for any count of lanes that is a multiple of LANES. */
FEW void products(
    const float *const *left, const float *right, long stride, long length, float *const *out, long lanes,
    const int rows, const int add) {
    for (long at = 0; at < lanes; at += WIDE * LANES) {
        float *to[ROWS];
        for (int r = 0; r < rows; r++) to[r] = out[r] + at;
        long left_over = (lanes - at) / LANES;
        if (left_over >= 4)
            product(left, right + at, stride, length, to, rows, 4, add);
        else if (left_over == 3)
            product(left, right + at, stride, length, to, rows, 3, add);
        else if (left_over == 2)
            product(left, right + at, stride, length, to, rows, 2, add);
        else
            product(left, right + at, stride, length, to, rows, 1, add);
    }
}

/* keys [size][dim] -> [dim][lanes], scaled, 0 where there is none. */
static void pack(const float *keys, long count, long dim, long lanes, float scale, float *to) {
    memset(to, 0, sizeof(float) * dim * lanes);
    for (long j = 0; j < count; j++)
        for (long d = 0; d < dim; d++) to[d * lanes + j] = scale * keys[j * dim + d];
}

/* x, whose first lane is number `at` of a row, without the numbers from `count` on. */
FEW vec within(vec x, long at, long count) {
    whole lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    whole there = lane < (whole){0} + (int32_t)(count - at);
    return (vec)(((whole)x & there) | ((whole)splat(-INFINITY) & ~there));
}

/* In place: exp of the first `count` of scores [lanes] less the highest of them, 0 behind those; their sum. */
FEW float grow(float *scores, long count, long lanes, float *most) {
    vec top = splat(-INFINITY), sum = splat(0);
    for (long i = 0; i < lanes; i += LANES) top = larger(within(load(scores + i), i, count), top);
    *most = highest(top);
    for (long i = 0; i < lanes; i += LANES) {
        vec x = exponential(within(load(scores + i), i, count) - splat(*most));
        store(scores + i, x);
        sum += x;
    }
    return total(sum);
}

/* ---- chosen blocks ---- */

typedef struct {
    int32_t query, place;
} Asked;

/* Some queries that chose one block. weights are those of this head, [queries][top_k]. */
FEW void attend_some(
    const Sizes *s, const float *queries, const float *keys, const float *values, const float *weights,
    const Asked *asked, float *out, float *scores, const int rows) {
    const float *left[ROWS], *inside[ROWS];
    float *found[ROWS], *to[ROWS];
    for (int r = 0; r < rows; r++) {
        left[r] = queries + (long)asked[r].query * s->dim;
        inside[r] = found[r] = scores + r * s->lanes;
        to[r] = out + (long)asked[r].query * s->dim;
    }
    products(left, keys, s->lanes, s->dim, found, s->lanes, rows, 0);
    for (int r = 0; r < rows; r++) {
        float most, sum = grow(found[r], s->size - 1, s->lanes, &most);
        vec share = splat(weights[(long)asked[r].query * s->top_k + asked[r].place] / sum);
        for (long i = 0; i < s->lanes; i += LANES) store(found[r] + i, load(found[r] + i) * share);
    }
    products(inside, values, s->dim, s->size - 1, to, s->dim, rows, 1);
}

static void attend_group(
    const Sizes *s, const float *queries, const float *packed, const float *values, const int64_t *blocks,
    const float *weights, float *out, int64_t *starts, Asked *asked, float *scores) {
    memset(starts, 0, sizeof(int64_t) * (s->blocks + 2));
    long pairs = s->queries * s->top_k;
    for (long i = 0; i < pairs; i++)
        if (blocks[i] >= 0) starts[blocks[i] + 2]++;
    for (long b = 0; b < s->blocks; b++) starts[b + 2] += starts[b + 1];
    for (long i = 0; i < pairs; i++)
        if (blocks[i] >= 0)
            asked[starts[blocks[i] + 1]++] = (Asked){(int32_t)(i / s->top_k), (int32_t)(i % s->top_k)};
    long head_queries = s->queries * s->dim;
    for (long b = 0; b < s->blocks; b++)
        for (long h = 0; h < s->heads; h++) {
            const float *q = queries + h * head_queries, *w = weights + h * pairs;
            const float *keys = packed + b * s->dim * s->lanes, *v = values + b * s->value_block;
            long at = starts[b], stop = starts[b + 1];
            for (; at + ROWS <= stop; at += ROWS)
                attend_some(s, q, keys, v, w, asked + at, out + h * head_queries, scores, ROWS);
            for (; at < stop; at++) attend_some(s, q, keys, v, w, asked + at, out + h * head_queries, scores, 1);
        }
}

/* keys [groups][blocks * size][dim] to packed [groups][blocks][dim][lanes]. */
void memstore_hils_pack(const float *keys, float *packed, const Sizes *s, int64_t key_block, int64_t key_head) {
#pragma omp parallel for num_threads((int)s->threads)
    for (long each = 0; each < s->groups * s->blocks; each++) {
        const float *from = keys + each / s->blocks * key_head + each % s->blocks * key_block;
        pack(from, s->size - 1, s->dim, s->lanes, s->scale, packed + each * s->dim * s->lanes);
    }
}

/* queries [groups][heads][queries][dim]; packed keys; values [groups][blocks][size or size - 1][dim];
 * blocks [groups][queries][top_k]; weights [groups][heads][queries][top_k]; added to out, shaped like queries.
 * Returns 0, or -1 where there was no memory. */
int memstore_hils_attend(
    const float *queries, const float *packed, const float *values, const int64_t *blocks, const float *weights,
    float *out, const Sizes *s) {
    int failed = 0;
#pragma omp parallel for num_threads((int)s->threads)
    for (long g = 0; g < s->groups; g++) {
        long each = s->heads * s->queries;
        int64_t *starts = malloc(sizeof(int64_t) * (s->blocks + 2));
        Asked *asked = malloc(sizeof(Asked) * (s->queries * s->top_k + 1));
        float *scores = aligned_alloc(64, sizeof(float) * ROWS * s->lanes);
        if (starts && asked && scores)
            attend_group(
                s, queries + g * each * s->dim, packed + g * s->blocks * s->dim * s->lanes, values + g * s->value_head,
                blocks + g * s->queries * s->top_k, weights + g * each * s->top_k, out + g * each * s->dim, starts,
                asked, scores);
        else
            failed = 1;
        free(starts);
        free(asked);
        free(scores);
    }
    return -failed;
}

/* ---- the window ---- */

/* Some queries of one block, the first at place `at`. packed and values begin with the block of place s->first. */
FEW void window_some(
    const Sizes *s, const float *queries, const float *packed, const float *values, long at, float *out, float *lse,
    float *scores, const int rows) {
    long size = s->size, base = s->first / size, own = at / size;
    long low = at - s->window + 1, begin = low > 0 ? low / size : 0;
    if (begin < base) begin = base;
    long span = (own + 1 - begin) * s->lanes;
    const float *left[ROWS], *inside[ROWS];
    float *found[ROWS], *to[ROWS];
    for (int r = 0; r < rows; r++) {
        left[r] = queries + r * s->dim;
        found[r] = scores + r * span;
        to[r] = out + r * s->dim;
    }
    for (long b = begin; b <= own; b++) {
        float *part[ROWS];
        for (int r = 0; r < rows; r++) part[r] = found[r] + (b - begin) * s->lanes;
        products(left, packed + (b - base) * s->dim * s->lanes, s->lanes, s->dim, part, s->lanes, rows, 0);
    }
    for (int r = 0; r < rows; r++) {
        long place = at + r, edge = place - s->window + 1;
        edge = edge > 0 ? edge / size : 0;
        for (long b = begin; b <= own; b++) {
            float *part = found[r] + (b - begin) * s->lanes;
            long count = b < edge ? 0 : b == own && place % size + 1 < size - 1 ? place % size + 1 : size - 1;
            for (long i = 0; i < s->lanes; i += LANES) store(part + i, within(load(part + i), i, count));
        }
        float most, sum = grow(found[r], span, span, &most), share = 1 / sum;
        lse[r] = most + logf(sum);
        for (long i = 0; i < span; i += LANES) store(found[r] + i, load(found[r] + i) * splat(share));
    }
    for (long b = begin; b <= own; b++) {
        for (int r = 0; r < rows; r++) inside[r] = found[r] + (b - begin) * s->lanes;
        long held = s->places - (b - base) * size, count = held < size - 1 ? held : size - 1;
        products(inside, values + (b - base) * size * s->dim, s->dim, count, to, s->dim, rows, b > begin);
    }
}

/* queries [groups][heads][queries][dim] of the last of `places` keys, the first of which, at place s->first,
 * begins a block; keys, values [groups][places][dim]; out as queries, lse [groups][heads][queries].
 * Returns 0, or -1 where there was no memory. */
int memstore_hils_window(
    const float *queries, const float *keys, const float *values, float *out, float *lse, const Sizes *s) {
    int failed = 0;
    long blocks = (s->places + s->size - 1) / s->size, reach = s->window / s->size + 3;
#pragma omp parallel for num_threads((int)s->threads)
    for (long g = 0; g < s->groups; g++) {
        float *packed = aligned_alloc(64, sizeof(float) * blocks * s->dim * s->lanes);
        float *scores = aligned_alloc(64, sizeof(float) * ROWS * reach * s->lanes);
        const float *v = values + g * s->value_head;
        for (long b = 0; packed && b < blocks; b++) {
            long held = s->places - b * s->size;
            pack(keys + g * s->value_head + b * s->size * s->dim, held < s->size ? held : s->size, s->dim, s->lanes,
                 s->scale, packed + b * s->dim * s->lanes);
        }
        for (long h = 0; packed && scores && h < s->heads; h++) {
            long head = (g * s->heads + h) * s->queries, start = s->first + s->places - s->queries;
            for (long at = start; at < start + s->queries;) {
                long stop = (at / s->size + 1) * s->size, row = head + at - start;
                if (stop > start + s->queries) stop = start + s->queries;
                const float *q = queries + row * s->dim;
                float *o = out + row * s->dim;
                if (at + ROWS <= stop) {
                    window_some(s, q, packed, v, at, o, lse + row, scores, ROWS);
                    at += ROWS;
                } else {
                    window_some(s, q, packed, v, at, o, lse + row, scores, 1);
                    at++;
                }
            }
        }
        if (!packed || !scores) failed = 1;
        free(packed);
        free(scores);
    }
    return -failed;
}

/* ---- the choice ---- */

/* Places of the top_k largest of x [n], in their order, of equal ones the first; -1 behind them where there are fewer. */
static void largest(const float *x, long n, long top_k, int64_t *places) {
    float least = -INFINITY;
    long kept = 0, equal = n;
    if (n > top_k) {
        float most = x[0];
        least = x[0];
        for (long i = 0; i < n; i++) {
            most = x[i] > most ? x[i] : most;
            least = x[i] < least ? x[i] : least;
        }
        /* The largest number that top_k are not less than, by halves: least is one, until there is none between. */
        float high = most, middle = most;
        for (;;) {
            int32_t count = 0;
            for (long i = 0; i < n; i++) count += x[i] >= middle;
            if (count >= top_k)
                least = middle;
            else
                high = middle;
            middle = least + (high - least) * 0.5f;
            if (count == top_k || !(middle > least && middle < high)) break; /* also where there are NaNs */
        }
        for (long i = 0; i < n; i++) equal -= x[i] > least;
        equal += top_k - n;
    }
    for (long i = 0; i < n && kept < top_k; i++)
        if (x[i] > least || (x[i] == least && equal-- > 0)) places[kept++] = i;
    while (kept < top_k) places[kept++] = -1;
}

/* Lists for one key-value head: its queries [heads][queries][dim], landmarks [heads][dim][lanes], bias [heads][lanes]. */
static void choose_group(
    const Sizes *s, const float *asked, const float *landmarks, const float *bias, const float *lse,
    const int64_t *counts, int64_t *blocks, float *chosen, float *scores) {
    long lanes = s->lanes, head = s->queries * s->dim, rows = s->heads > 1 ? s->heads : ROWS;
    float *best = scores + rows * lanes;
    for (long at = 0; at < s->queries; at += s->heads > 1 ? 1 : ROWS) {
        long some = s->heads > 1 ? s->heads : s->queries - at < ROWS ? s->queries - at : ROWS;
        long last = s->heads > 1 ? at : at + some - 1, wide = (counts[last] + LANES - 1) / LANES * LANES;
        for (long r = 0; r < some; r++) {
            const float *left = s->heads > 1 ? asked + r * head + at * s->dim : asked + (at + r) * s->dim;
            long h = s->heads > 1 ? r : 0;
            memcpy(scores + r * lanes, bias + h * lanes, sizeof(float) * wide);
            if (s->heads > 1) {
                float *to = scores + r * lanes;
                products(&left, landmarks + h * s->dim * lanes, lanes, s->dim, &to, wide, 1, 1);
            }
        }
        if (s->heads == 1) {
            const float *left[ROWS];
            float *to[ROWS];
            for (int r = 0; r < ROWS; r++) { /* those that are missing are computed for nothing */
                left[r] = asked + (at + (r < some ? r : 0)) * s->dim;
                to[r] = scores + r * lanes;
            }
            products(left, landmarks, lanes, s->dim, to, wide, ROWS, 1);
            for (long r = 0; r < some; r++) {
                int64_t *list = blocks + (at + r) * s->top_k;
                largest(scores + r * lanes, counts[at + r], s->top_k, list);
                for (long k = 0; k < s->top_k; k++)
                    chosen[(at + r) * s->top_k + k] = list[k] < 0 ? -INFINITY : scores[r * lanes + list[k]];
            }
            continue;
        }
        long count = counts[at];
        for (long i = 0; i < count; i++) best[i] = -INFINITY;
        for (long r = 0; r < some; r++) {
            const float *x = scores + r * lanes;
            float window = lse[r * s->queries + at], top = window, sum = 0;
            for (long i = 0; i < count; i++) top = x[i] > top ? x[i] : top;
            for (long i = 0; i < count; i++) sum += expf(x[i] - top);
            float all = top + logf(sum + expf(window - top));
            for (long i = 0; i < count; i++) best[i] = x[i] - all > best[i] ? x[i] - all : best[i];
        }
        int64_t *list = blocks + at * s->top_k;
        largest(best, count, s->top_k, list);
        for (long r = 0; r < some; r++)
            for (long k = 0; k < s->top_k; k++)
                chosen[(r * s->queries + at) * s->top_k + k] = list[k] < 0 ? -INFINITY : scores[r * lanes + list[k]];
    }
}

/* asked [groups][heads][queries][dim]: landmark queries; landmarks [groups][heads][dim][lanes]: scaled mean keys; bias
 * [groups][heads][lanes]; lse [groups][heads][queries]; counts [queries]: blocks that each may choose among, ascending.
 * To blocks [groups][queries][top_k] and chosen [groups][heads][queries][top_k]. Returns as above. */
int memstore_hils_choose(
    const float *asked, const float *landmarks, const float *bias, const float *lse, const int64_t *counts,
    int64_t *blocks, float *chosen, const Sizes *s) {
    int failed = 0;
    long rows = (s->heads > 1 ? s->heads : ROWS) + 1, each = s->heads * s->queries;
#pragma omp parallel for num_threads((int)s->threads)
    for (long g = 0; g < s->groups; g++) {
        float *scores = aligned_alloc(64, sizeof(float) * rows * s->lanes);
        if (scores)
            choose_group(
                s, asked + g * each * s->dim, landmarks + g * s->heads * s->dim * s->lanes, bias + g * s->heads * s->lanes,
                lse + g * each, counts, blocks + g * s->queries * s->top_k, chosen + g * each * s->top_k, scores);
        else
            failed = 1;
        free(scores);
    }
    return -failed;
}
