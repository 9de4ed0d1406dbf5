/* The best keys of an index of heads for each query, in one pass over the keys: what native.py says.
 *
 * Two ways to scores, whose products are summed in the same order and whose heads are not:
 *
 * - For few queries keys are multiplied as they lie in memory. A vector holds one number of a query for each of LANES heads,
 *   and a number of a key is broadcast against it; what comes out is added over heads in registers.
 * - For many queries some keys are turned, so that a vector holds one number of each of LANES keys, and numbers of queries
 *   are broadcast against it.
 *
 * Scores of a panel of keys are written down, those above the smallest that can still be chosen become candidates, and
 * candidates are thinned out to the best k when there is no room for more: nobody sorts all scores, or has them all in
 * memory. A candidate is one number of 64 bits, the score above and the position, counted down, below: no two are equal,
 * and of equal scores the smaller position is the larger number. A score is computed in the same order wherever its key
 * lies in a slice, so that the choice does not depend on slices.
 *
 * Keys may have codes in 8 bits beside them. Codes give an upper bound on each score, and only the keys whose bound is above
 * the smallest score that can still be chosen are scored as above. So the choice stays the same, bit for bit.
 */

#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined __F16C__ || defined __AVX2__
#include <immintrin.h>
#endif

#define RUN 16   /* keys that are multiplied side by side */
#define RUNS 4   /* that stay in the first cache while all queries pass */
#define PASS (RUN * RUNS)
#define LINE 64
#define AHEAD 4096 /* bytes: the processor reads ahead by itself, but not across pages */
#define SIDE 4 /* heads of a tile for many queries */
#if LANES == 16
#define TILE 16 /* sums that fit into registers */
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define TILE 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define TILE 8
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
#define WIDE (TILE / SIDE) /* vectors of keys of a tile */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const char *keys;     /* [count, dim], `stride` numbers from one to the next */
    const float *queries; /* few: [rows, vectors, dim, LANES]; many: [rows, heads, dim] */
    const float *weights; /* few: [rows, vectors, LANES]; many: [rows, heads] */
    const int64_t *limit; /* [rows] */
    float *scores;        /* [rows, width] */
    float *least;         /* [rows]: a score must be larger to be a candidate */
    uint64_t *candidates; /* [rows, capacity] */
    int64_t *counts;      /* [rows] */
    const uint8_t *codes; /* [coded / PASS, wide / 4, PASS, 4], raised by 128; wide: dim, filled up to a multiple of 4 */
    const float *about;   /* [coded / PASS, 3, PASS]: a key's step, error and norm */
    int64_t kind, count, stride, first; /* kind: of the numbers of a key; first: the position of the first key */
    int64_t dim, rows, heads;
    int64_t vectors;      /* of a query; 0 for many queries */
    int64_t relu, block, k, capacity, threads;
    int64_t panel, width; /* keys of a panel, a multiple of the block; the same, filled up to a multiple of PASS */
    int64_t step, coded;  /* keys of the first panel with codes; first keys of the chunk that have codes */
    /* Set here: */
    int8_t *asked;        /* [rows, heads, wide]: codes of queries */
    int32_t *starts;      /* [rows, heads]: where sums begin, because the codes of keys are raised */
    float *parts;         /* [rows, heads]: weights times the steps of queries */
    float *factors;       /* [rows, 3] of the bound: of a key's error, of its norm, and what is added */
    const int64_t *picks; /* keys that are scored in place of neighbours, or NULL */
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

/* Whether one of PASS scores is larger than `least`. */
static int any_above(const float *scores, float least) {
    Mask above = {0};
    for (int i = 0; i < PASS; i += LANES) above |= (Mask)(*(const Vector *)(scores + i) > least);
    uint64_t words[LANES / 2], any = 0;
    memcpy(words, &above, sizeof words);
    for (int i = 0; i < LANES / 2; i++) any |= words[i];
    return any != 0;
}

static void choose(const Scan *scan, int64_t row, int64_t start, int64_t stop) {
    float *scores = scan->scores + row * scan->width, least = scan->least[row];
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
        if (some + PASS <= n && !any_above(scores + some, least)) {
            some += PASS - LANES;
            continue;
        }
        if (count + LANES > scan->capacity) {
            largest(candidates, count, scan->k, 0);
            count = scan->k;
            uint64_t last = candidates[0];
            for (int64_t c = 1; c < count; c++) last = candidates[c] < last ? candidates[c] : last;
            least = score_of(last);
        }
        for (int64_t i = some; i < (some + LANES < n ? some + LANES : n); i++) {
            candidates[count] = packed(scores[i], position + i);
            count += scores[i] > least; /* no branch, which would be guessed wrong; what is no number is not */
        }
    }
    scan->counts[row] = count;
    scan->least[row] = least;
}

/* ---- scores ---- */

/* `count` keys in float32, `pitch` numbers from one to the next, zeros behind them up to `most`. */
static void widen(const Scan *scan, int64_t first, int64_t count, int64_t most, int64_t pitch, float *out) {
    for (int64_t place = first; place < first + count; place++, out += pitch) {
        int64_t key = scan->picks ? scan->picks[place] : place;
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
    memset(out, 0, (size_t)((most - count) * pitch) * sizeof *out);
}

static inline Vector rectified(const Scan *scan, Vector x) {
    return scan->relu ? (Vector)((Mask)x & ~(Mask)(x < 0.0f)) : x; /* what is no number stays none */
}

/* The products of RUN keys with `wide` vectors of a query (a constant, 1 or 2) from `vector` on, added to `sums`. */
static inline __attribute__((always_inline)) void multiply(
    const Scan *scan, const float *keys, int64_t stride, int64_t vector, const int wide, Vector *sums) {
    int64_t dim = scan->dim, heads = scan->heads - vector % scan->vectors * LANES;
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
            Mask there; /* infinity times nothing is no number: lanes without a head must not reach the sum */
            for (int lane = 0; lane < LANES; lane++) there[lane] = -(lane + w * LANES < heads);
#pragma GCC unroll 16
            for (int j = 0; j < tile; j++)
                sums[key + j] += (Vector)((Mask)(rectified(scan, products[w][j]) * weights) & there);
        }
    }
}

/* Sums of neighbouring lanes, of two vectors in one. */
static Vector folded(Vector a, Vector b) {
    return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
}

/* The keys from `first` to before `stop`, at most PASS of them, for few queries. The panel begins at `start`. */
static void score_few(const Scan *scan, int64_t start, int64_t first, int64_t stop) {
    float room[RUN * scan->dim];
    int64_t size = scan->kind == FLOAT32 ? 4 : 2;
    for (int64_t key = first; key < stop; key += RUN) {
        int64_t count = stop - key < RUN ? stop - key : RUN, stride = scan->dim;
        const char *there = scan->keys + key * scan->stride * size;
        const float *wide = room;
        for (int64_t line = 0; !scan->picks && line < RUN * scan->stride * size; line += LINE)
            __builtin_prefetch(there + AHEAD + line);
        if (scan->kind == FLOAT32 && count == RUN && !scan->picks)
            wide = (const float *)(const void *)there, stride = scan->stride;
        else
            widen(scan, key, count, RUN, scan->dim, room);
        for (int64_t row = 0; row < scan->rows; row++) {
            Vector sums[RUN] = {{0}};
            for (int64_t v = 0; v < scan->vectors; v += 2)
                if (v + 1 < scan->vectors)
                    multiply(scan, wide, stride, row * scan->vectors + v, 2, sums);
                else
                    multiply(scan, wide, stride, row * scan->vectors + v, 1, sums);
            for (int left = RUN; left > RUN / LANES; left /= 2)
                for (int j = 0; j < left / 2; j++) sums[j] = folded(sums[2 * j], sums[2 * j + 1]);
            memcpy(scan->scores + row * scan->width + key - start, sums, (size_t)count * sizeof(float));
        }
    }
}

/* LANES numbers of each of LANES keys, `pitch` from one key to the next, by number and then by key. */
static void turn(const float *keys, int64_t pitch, float *turned) {
    Vector rows[LANES], next[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = *(const Vector *)(keys + i * pitch);
    for (int step = 1; step < LANES; step *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            Vector a = rows[i], b = rows[i + LANES / 2];
            next[2 * i] = __builtin_shufflevector(a, b, LOW);
            next[2 * i + 1] = __builtin_shufflevector(a, b, HIGH);
        }
        memcpy(rows, next, sizeof rows);
    }
    for (int i = 0; i < LANES; i++) *(Vector *)(turned + i * PASS) = rows[i];
}

/* The same for many queries: SIDE heads by WIDE vectors of keys at a time. */
static void score_many(const Scan *scan, int64_t start, int64_t first, int64_t stop) {
    int64_t dim = scan->dim, pitch = (dim + LANES - 1) / LANES * LANES;
    int64_t count = stop - first, pairs = scan->rows * scan->heads;
    float wide[PASS * pitch], turned[pitch * PASS], *out = scan->scores + first - start;
    widen(scan, first, count, PASS, pitch, wide);
    for (int64_t key = 0; key < PASS; key += LANES)
        for (int64_t d = 0; d < dim; d += LANES) turn(wide + key * pitch + d, pitch, turned + d * PASS + key);
    for (int64_t pair = 0; pair < pairs; pair += SIDE) {
        const float *query[SIDE];
        for (int h = 0; h < SIDE; h++) query[h] = scan->queries + (pair + h < pairs ? pair + h : pair) * dim;
        for (int64_t at = 0; at < count; at += WIDE * LANES) {
            Vector products[SIDE][WIDE] = {{{0}}};
            const Vector *keys = (const Vector *)(turned + at);
            for (int64_t d = 0; d < dim; d++, keys += PASS / LANES) {
#pragma GCC unroll 4
                for (int h = 0; h < SIDE; h++) {
#pragma GCC unroll 4
                    for (int v = 0; v < WIDE; v++) products[h][v] += keys[v] * query[h][d];
                }
            }
            for (int64_t h = 0; h < SIDE && pair + h < pairs; h++) {
                int64_t row = (pair + h) / scan->heads, head = (pair + h) % scan->heads;
                float *sums = out + row * scan->width + at;
                for (int64_t v = 0; v < WIDE; v++) {
                    Vector sum = rectified(scan, products[h][v]) * scan->weights[pair + h];
                    if (head) sum += *(const Vector *)(sums + v * LANES);
                    *(Vector *)(sums + v * LANES) = sum;
                }
            }
        }
    }
}

/* ---- codes ----
 *
 * The score is f(Q, k) = sum_h w_h relu(q_h . k), and ReLU does not enlarge differences. So |f(Q, k) - f(Q, k')| <= L(Q)
 * |k - k'|, where L(Q) is the largest norm of sum_h d_h w_h q_h for d_h in [0, 1]. It is at most sqrt(sum |w|)
 * sigma(sqrt(|w|) Q), where sigma is the largest singular value, and at most that of a Schatten norm. In the same way
 * |f(Q, k') - f(Q', k')| <= L(Q - Q') |k'|. With many heads this is several times as tight as a sum of norms over heads. It
 * also holds without ReLU. The bound includes what float32 rounds, in exact scores and in those of codes.
 */

#define LARGEST 0x1p40f   /* from it on, everything is scored: products may overflow, or those rounded to 0 may count */
#define SMALLEST 0x1p-100f /* the smallest step of a code */
#define MOST_HEADS 128     /* some arrays are on the stack */
#define SQUARED 3          /* times that the Gram matrix is squared, for a Schatten norm of 2 ** (SQUARED + 2) */
#ifdef __AVX512VNNI__
#define LARGEST_CODE 127
#else
#define LARGEST_CODE 63 /* of a query: the sum of two products must fit into 16 bits */
#endif

/* Codes of `x`, zeros behind them, and what they lose; returns their step. */
static float encode(const float *x, int64_t dim, int64_t wide, float largest, int8_t *codes, float *lost) {
    float top = 0;
    for (int64_t d = 0; d < dim; d++) top = fabsf(x[d]) > top ? fabsf(x[d]) : top;
    float step = top / largest > SMALLEST ? top / largest : SMALLEST;
    for (int64_t d = 0; d < dim; d++) {
        float code = rintf(x[d] / step);
        code = code < largest ? code > -largest ? code : -largest : code >= largest ? largest : 0; /* 0: is no number */
        codes[d] = (int8_t)code;
        lost[d] = x[d] - code * step;
    }
    memset(codes + dim, 0, (size_t)(wide - dim));
    return step;
}

static double norm(const float *x, int64_t dim) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < dim; d++) sum += (double)x[d] * x[d];
    return sqrt(sum);
}

/* Codes of the keys, whose number is a multiple of PASS, as Scan describes them. */
void memstore_encode(const Scan *scan, uint8_t *codes, float *about) {
    int64_t dim = scan->dim, wide = (dim + 3) / 4 * 4;
    float key[dim], lost[dim];
    int8_t code[wide];
    for (int64_t at = 0; at < scan->count; at++) {
        int64_t group = at / PASS, place = at % PASS;
        widen(scan, at, 1, 1, dim, key);
        float *to = about + group * 3 * PASS + place;
        *to = encode(key, dim, wide, 127, code, lost);
        double error = norm(lost, dim), size = norm(key, dim) + error;
        to[PASS] = size < LARGEST ? (float)(error * (1 + 1e-5)) + SMALLEST : INFINITY;
        to[2 * PASS] = (float)(size * (1 + 1e-5)) + SMALLEST;
        for (int64_t d = 0; d < wide; d++)
            codes[group * PASS * wide + (d / 4 * PASS + place) * 4 + d % 4] = (uint8_t)(code[d] + 128);
    }
}

/* A bound on the largest singular value of `x` [heads, dim], whose rows are multiplied by the roots of weights. */
static double singular(const float *x, const float *weights, int64_t heads, int64_t dim) {
    double rooms[2][heads * heads], *gram = rooms[0], *next = rooms[1], bound = 1, part = 0.5;
    for (int64_t i = 0; i < heads; i++)
        for (int64_t j = 0; j <= i; j++) {
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < dim; d++) sum += (double)x[i * dim + d] * x[j * dim + d];
            gram[i * heads + j] = gram[j * heads + i] = sum * sqrt(fabs((double)weights[i]) * fabs((double)weights[j]));
        }
    for (int squared = 0;; squared++) {
        double size = 0;
        for (int64_t i = 0; i < heads * heads; i++) size += gram[i] * gram[i];
        size = sqrt(size);
        bound *= pow(size, part), part /= 2;
        if (squared == SQUARED || size == 0) return bound;
        for (int64_t i = 0; i < heads * heads; i++) gram[i] /= size;
        memset(next, 0, (size_t)(heads * heads) * sizeof *next);
        for (int64_t i = 0; i < heads; i++)
            for (int64_t k = 0; k < heads; k++)
                for (int64_t j = 0; j < heads; j++) next[i * heads + j] += gram[i * heads + k] * gram[k * heads + j];
        double *other = gram;
        gram = next, next = other;
    }
}

/* Codes of the queries, and the rest that `bound` reads. */
static void encode_queries(const Scan *scan) {
    int64_t heads = scan->heads, dim = scan->dim, wide = (dim + 3) / 4 * 4;
#pragma omp parallel for num_threads((int)scan->threads)
    for (int64_t row = 0; row < scan->rows; row++) {
        float queries[heads * dim], lost[heads * dim], weights[heads];
        double most = 0, total = 0;
        int usual = 1;
        for (int64_t head = 0; head < heads; head++) {
            int64_t pair = row * heads + head, vector = row * scan->vectors + head / LANES, lane = head % LANES;
            float *query = queries + head * dim;
            if (scan->vectors)
                for (int64_t d = 0; d < dim; d++) query[d] = scan->queries[(vector * dim + d) * LANES + lane];
            else
                memcpy(query, scan->queries + pair * dim, (size_t)dim * sizeof *query);
            weights[head] = scan->weights[scan->vectors ? vector * LANES + lane : pair];
            int8_t *codes = scan->asked + pair * wide;
            float step = encode(query, dim, wide, LARGEST_CODE, codes, lost + head * dim);
            int32_t sum = 0;
            for (int64_t d = 0; d < wide; d++) sum += codes[d];
            scan->starts[pair] = -128 * sum, scan->parts[pair] = weights[head] * step;
            double size = norm(query, dim), weight = fabs((double)weights[head]);
            most += weight * size, total += weight, usual = usual && size < LARGEST;
        }
        double of_query = singular(queries, weights, heads, dim), of_lost = singular(lost, weights, heads, dim);
        usual = usual && most < LARGEST && total < LARGEST;
        float *factors = scan->factors + row * 3;
        factors[0] = (float)(sqrt(total) * of_query * (1 + 1e-5));
        factors[1] = (float)(sqrt(total) * of_lost * (1 + 1e-5) + most * (double)(dim + heads + 8) * 0x1p-22);
        factors[2] = usual ? (float)heads * 0x1p-44f : INFINITY; /* numbers below 2 ** -126 may count as 0 */
    }
}

#ifdef __AVX2__
#ifdef __AVX512VNNI__
#define KEYS 4
typedef __m512i Whole;
typedef __m512 Floats;
#define LOAD _mm512_loadu_si512
#define SPREAD _mm512_set1_epi32
#define ADD_PRODUCTS _mm512_dpbusd_epi32
#define FLOATS(sum, floor) _mm512_cvtepi32_ps(_mm512_max_epi32(sum, floor))
#define NUMBER(x) _mm512_min_ps(x, _mm512_set1_ps(INFINITY))
#else
#define KEYS 2
typedef __m256i Whole;
typedef __m256 Floats;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(const void *)(from))
#define SPREAD _mm256_set1_epi32
#define ADD_PRODUCTS(sum, keys, query) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(keys, query), _mm256_set1_epi16(1)))
#define FLOATS(sum, floor) _mm256_cvtepi32_ps(_mm256_max_epi32(sum, floor))
#define NUMBER(x) _mm256_min_ps(x, _mm256_set1_ps(INFINITY))
#endif
#define WHOLE ((int64_t)(sizeof(Whole) / 4)) /* keys of a vector */

/* Adds the products of some keys with `side` heads (a constant) from `pair` on. */
static inline __attribute__((always_inline)) void estimate(
    const Scan *scan, const uint8_t *codes, int64_t pair, const int side, Floats *sums) {
    int64_t wide = (scan->dim + 3) / 4 * 4;
    Whole products[SIDE][KEYS], floor = SPREAD(scan->relu ? 0 : INT_MIN);
    for (int h = 0; h < side; h++)
        for (int v = 0; v < KEYS; v++) products[h][v] = SPREAD(scan->starts[pair + h]);
    for (int64_t d = 0; d < wide; d += 4) {
        Whole keys[KEYS];
        for (int v = 0; v < KEYS; v++) keys[v] = LOAD(codes + d * PASS + v * 4 * WHOLE);
        for (int h = 0; h < side; h++) {
            int32_t query;
            memcpy(&query, scan->asked + (pair + h) * wide + d, sizeof query);
            for (int v = 0; v < KEYS; v++) products[h][v] = ADD_PRODUCTS(products[h][v], keys[v], SPREAD(query));
        }
    }
    for (int h = 0; h < side; h++)
        for (int v = 0; v < KEYS; v++) sums[v] += FLOATS(products[h][v], floor) * scan->parts[pair + h];
}

/* Upper bounds on the scores of PASS keys. What is no number becomes infinity. */
static void bound(const Scan *scan, int64_t start, int64_t first) {
    const uint8_t *codes = scan->codes + first * ((scan->dim + 3) / 4 * 4);
    const float *about = scan->about + first * 3;
    for (int64_t row = 0; row < scan->rows; row++)
        for (int64_t key = 0; key < PASS; key += KEYS * WHOLE) {
            const float *factors = scan->factors + row * 3;
            Floats sums[KEYS] = {{0}};
            int64_t pair = row * scan->heads, end = pair + scan->heads;
            for (; pair + SIDE <= end; pair += SIDE) estimate(scan, codes + key * 4, pair, SIDE, sums);
            for (; pair < end; pair++) estimate(scan, codes + key * 4, pair, 1, sums);
            for (int64_t v = 0; v < KEYS; v++) {
                Floats of[3];
                for (int i = 0; i < 3; i++) memcpy(&of[i], about + i * PASS + key + v * WHOLE, sizeof *of);
                sums[v] = NUMBER(sums[v] * of[0] + (of[1] * factors[0] + of[2] * factors[1] + factors[2]));
                memcpy(scan->scores + row * scan->width + first - start + key + v * WHOLE, &sums[v], sizeof *of);
            }
        }
}
#else
static void bound(const Scan *scan, int64_t start, int64_t first) { (void)scan, (void)start, (void)first; }
#endif

/* Puts scores in the places of bounds that are large enough, and -infinity in those of others. */
static void look(const Scan *scan, int64_t row, int64_t start, int64_t stop) {
    int64_t picks[2 * PASS], count = 0, size = scan->dim * (scan->vectors ? scan->vectors * LANES : scan->heads);
    float *scores = scan->scores + row * scan->width, least = scan->least[row], found[PASS];
    Scan one = *scan;
    one.picks = picks, one.scores = found, one.rows = 1, one.width = PASS;
    one.queries += row * size, one.weights += row * size / scan->dim;
    for (int64_t key = start; key < stop || count; key += PASS) {
        if (key < stop && any_above(scores + key - start, least))
            for (int64_t i = key; i < (key + PASS < stop ? key + PASS : stop); i++) {
                picks[count] = i;
                count += scores[i - start] > least;
            }
        if (key < stop)
            for (int64_t i = 0; i < PASS; i++) scores[key - start + i] = -INFINITY;
        if (!count || (count < PASS && key + PASS < stop)) continue;
        int64_t some = count < PASS ? count : PASS;
        (scan->vectors ? score_few : score_many)(&one, 0, 0, some);
        for (int64_t i = 0; i < some; i++) scores[picks[i] - start] = found[i];
        count -= some;
        memmove(picks, picks + some, (size_t)count * sizeof *picks);
    }
}

/* All keys of a chunk. Without memory for codes of queries, all keys are scored. */
void memstore_scan(Scan *scan) {
    int64_t seen = 0, pairs = scan->rows * scan->heads, wide = (scan->dim + 3) / 4 * 4;
    scan->picks = NULL;
    if (scan->heads > MOST_HEADS) scan->coded = 0;
    if (scan->coded) {
        size_t numbers = (size_t)(2 * pairs + 3 * scan->rows) * sizeof(float);
        scan->starts = malloc(numbers + (size_t)(pairs * wide));
        scan->coded = scan->starts ? scan->coded : 0;
    }
    if (scan->coded) {
        scan->parts = (float *)(void *)(scan->starts + pairs), scan->factors = scan->parts + pairs;
        scan->asked = (int8_t *)(void *)(scan->factors + 3 * scan->rows);
        encode_queries(scan);
    }
    for (int64_t row = 0; row < scan->rows; row++) {
        int64_t sees = scan->limit[row] - scan->first;
        seen = sees > seen ? sees : seen;
    }
    seen = seen < scan->count ? seen : scan->count;
    for (int64_t start = 0, stop = 0; start < seen; start = stop) {
        int coded = start < scan->coded;
        int64_t size = coded ? start / 2 / scan->step * scan->step : scan->panel, end = coded ? scan->coded : seen;
        size = size < scan->step ? scan->step : size < scan->panel ? size : scan->panel;
        end = end < seen ? end : seen;
        stop = start + size < end ? start + size : end;
#pragma omp parallel for num_threads((int)scan->threads)
        for (int64_t first = start; first < stop; first += PASS) {
            if (coded)
                bound(scan, start, first);
            else
                (scan->vectors ? score_few : score_many)(scan, start, first, first + PASS < stop ? first + PASS : stop);
        }
#pragma omp parallel for num_threads((int)scan->threads)
        for (int64_t row = 0; row < scan->rows; row++) {
            if (coded) look(scan, row, start, stop);
            choose(scan, row, start, stop);
        }
    }
    if (scan->coded) free(scan->starts);
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
