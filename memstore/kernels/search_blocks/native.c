/* The best blocks, in one pass over the keys: what native.py says.
 *
 * Each key is read from memory once. Some keys at a time are widened to float32 where they are bfloat16, and multiplied
 * with all queries: one by one if there are few, else side by side in the lanes of vectors, where no sum is taken across
 * a vector. Only blocks that are as good as the last of the best are put among them, so nearly all products stay in the
 * processor's cache. At the end the best blocks are scored once more, always in the same order of sums.
 *
 * A block is as good as its best key; of equal blocks the smaller id comes first. Either all queries look into all
 * parts, or each into its own.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD 8192 /* bytes: the processor reads ahead by itself, but not far enough */
#define LINE 64
#define TILE 48 /* keys at a time */

/* HEIGHT keys and WIDE vectors of queries are multiplied at a time, as many as registers hold the sums of. With one
 * vector TALL keys are enough to hide how long an addition takes. */
#define WIDE 2
#define TALL 12
#if defined __AVX512F__
#include <immintrin.h>
#define LANES 16
#define HEIGHT 12
#define FEW 4 /* queries up to which they are multiplied one by one */
typedef __m512 Lanes;
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SPREAD _mm512_set1_ps
#define FUSED _mm512_fmadd_ps
#define LARGER _mm512_max_ps
#define REACHES(a, b) ((unsigned)_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ))
#elif defined __AVX2__ && defined __FMA__
#include <immintrin.h>
#define LANES 8
#define HEIGHT 6
#define FEW 2
typedef __m256 Lanes;
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SPREAD _mm256_set1_ps
#define FUSED _mm256_fmadd_ps
#define LARGER _mm256_max_ps
#define REACHES(a, b) ((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)))
#else /* vectors of the compiler's own */
#define LANES 4
#define HEIGHT 6
#define FEW 2
typedef float Lanes __attribute__((vector_size(16)));
typedef int32_t Masks __attribute__((vector_size(16)));
#define LOAD(from) (*(const Unaligned *)(const void *)(from))
#define STORE(to, x) (*(Unaligned *)(void *)(to) = (x))
#define SPREAD(x) ((Lanes){x, x, x, x})
#define FUSED(a, b, c) ((a) * (b) + (c))
typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
static inline Lanes LARGER(Lanes a, Lanes b) {
    Masks above = a > b;
    return (Lanes)(((Masks)a & above) | ((Masks)b & ~above));
}
static inline unsigned REACHES(Lanes a, Lanes b) {
    Masks not_below = a >= b; /* 0 or -1 */
    return (unsigned)((not_below[0] & 1) | (not_below[1] & 2) | (not_below[2] & 4) | (not_below[3] & 8));
}
#endif
#define PANEL (WIDE * LANES) /* queries side by side */

static inline float total(Lanes x) {
#if LANES == 4
    return (x[0] + x[1]) + (x[2] + x[3]);
#else
#if LANES == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
    __m256 half = x;
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
}

typedef struct {
    const void *keys;      /* [blocks, size, dim] of one key head, float32 or bfloat16 */
    const int64_t *ids;    /* [blocks], or NULL: 0, 1, ... */
    const uint8_t *wanted; /* [blocks], or NULL: all count */
    int64_t blocks;
    int64_t place; /* of the first block */
} Part;

typedef struct {
    int64_t size, dim, rows, k;
    int64_t half;   /* whether keys are bfloat16 */
    int64_t settle; /* how the best are scored again; NO: not, and places are returned instead of offsets */
} Sizes;

enum { NO, VECTORS, IN_ORDER };

typedef struct { /* [rows, k] each, best first; filled with -infinity, -1 and -1 */
    float *scores;
    int64_t *ids;
    int64_t *offsets; /* of the best key in its block; until the end, part * PARTED + block */
} Best;

#define PARTED ((int64_t)1 << 32)

typedef struct { /* of one thread */
    const float *queries; /* [panels, dim, PANEL], or [rows, dim] if they are few */
    float *limits;        /* [panels, PANEL]: the score that a block must reach; infinite where there is no query */
    float *most;          /* [panels, PANEL]: the best product of a block that does not fit into a tile, so far */
    float *products;      /* [TILE, PANEL] */
    float *keys;          /* [TILE, dim]: widened */
    Best best;
} Room;

static float product(const float *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static float half_product(const uint16_t *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += widened(a[i]) * b[i];
    return sum;
}

/* A product whose numbers are added one after the other. */
static float in_order(const Sizes *sizes, const void *key, const float *query) {
    float sum = 0;
    for (int64_t i = 0; i < sizes->dim; i++)
        sum += (sizes->half ? widened(((const uint16_t *)key)[i]) : ((const float *)key)[i]) * query[i];
    return sum;
}

/* The best of the `size` keys from `first` on for one query. */
static float best_key(const Part *part, const Sizes *sizes, int64_t first, const float *query, int64_t *offset) {
    float most = -INFINITY;
    int64_t bytes = sizes->dim * (sizes->half ? 2 : 4);
    const char *key = (const char *)part->keys + first * bytes;
    *offset = 0;
    for (int64_t place = 0; place < sizes->size; place++, key += bytes) {
        for (int64_t line = 0; line < bytes; line += LINE) __builtin_prefetch(key + AHEAD + line);
        float score = sizes->settle == IN_ORDER ? in_order(sizes, key, query)
                      : sizes->half ? half_product((const uint16_t *)(const void *)key, query, sizes->dim)
                                    : product((const float *)(const void *)key, query, sizes->dim);
        if (score > most) most = score, *offset = place;
    }
    return most;
}

static void insert(const Best *best, int64_t first, int64_t k, float score, int64_t id, int64_t offset) {
    float *scores = best->scores + first;
    int64_t *ids = best->ids + first, *offsets = best->offsets + first, at = k - 1;
    if (score == -INFINITY) return; /* as good as none */
    if (ids[at] >= 0 && (score < scores[at] || (score == scores[at] && id > ids[at]))) return;
    for (; at > 0 && (ids[at - 1] < 0 || scores[at - 1] < score || (scores[at - 1] == score && ids[at - 1] > id)); at--) {
        scores[at] = scores[at - 1];
        ids[at] = ids[at - 1];
        offsets[at] = offsets[at - 1];
    }
    scores[at] = score;
    ids[at] = id;
    offsets[at] = offset;
}

static inline __attribute__((always_inline)) void multiply(
    const float *keys, const float *queries, float *products, int64_t dim, const int wide, const int height) {
    Lanes sums[TALL * WIDE];
    for (int i = 0; i < height * wide; i++) sums[i] = SPREAD(0);
    for (int64_t d = 0; d < dim; d++) {
        Lanes asked[WIDE];
        __builtin_prefetch((const char *)(keys + TILE * dim + d * height));
        for (int w = 0; w < wide; w++) asked[w] = LOAD(queries + d * PANEL + w * LANES);
        for (int k = 0; k < height; k++) {
            Lanes key = SPREAD(keys[k * dim + d]);
            for (int w = 0; w < wide; w++) sums[k * wide + w] = FUSED(key, asked[w], sums[k * wide + w]);
        }
    }
    for (int k = 0; k < height; k++)
        for (int w = 0; w < wide; w++) STORE(products + k * PANEL + w * LANES, sums[k * wide + w]);
}

/* Products of `count` keys with a panel of queries, of which `wide` vectors are used, `height` keys at a time. Both
 * numbers are constants. */
static inline __attribute__((always_inline)) void multiply_panel(
    const float *keys, int64_t count, const float *queries, float *products, int64_t dim, const int wide,
    const int height) {
    int64_t k = 0;
    for (; k + height <= count; k += height)
        multiply(keys + k * dim, queries, products + k * PANEL, dim, wide, height);
    for (; k < count; k++) multiply(keys + k * dim, queries, products + k * PANEL, dim, wide, 1);
}

/* Products of four keys with `rows` queries, one by one. */
static void multiply_four(
    const float *const keys[4], const float *queries, int64_t rows, float *products, int64_t dim) {
    for (int64_t row = 0; row < rows; row++, queries += dim) {
        Lanes sums[4] = {SPREAD(0), SPREAD(0), SPREAD(0), SPREAD(0)};
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            Lanes asked = LOAD(queries + d);
            for (int k = 0; k < 4; k++) sums[k] = FUSED(LOAD(keys[k] + d), asked, sums[k]);
        }
        for (int k = 0; k < 4; k++) {
            float sum = total(sums[k]);
            for (int64_t rest = d; rest < dim; rest++) sum += keys[k][rest] * queries[rest];
            products[k * PANEL + row] = sum;
        }
    }
}

static void multiply_few(
    const float *keys, int64_t count, const float *queries, int64_t rows, float *products, int64_t dim) {
    for (int64_t k = 0; k < count; k += 4) { /* the last key again where there are no four; `products` has room */
        const float *key[4];
        for (int i = 0; i < 4; i++) key[i] = keys + (k + i < count ? k + i : count - 1) * dim;
        for (int64_t i = 0; i < 4 * dim; i += LINE / 4) __builtin_prefetch((const char *)(key[0] + i) + AHEAD);
        multiply_four(key, queries, rows, products + k * PANEL, dim);
    }
}

/* Put blocks among the best of the queries from `first` on that stand in one vector. The tile's `count` keys are of the
 * blocks `chosen`, from place `at` of the first of them on. */
static void keep(const Room *room, const Sizes *sizes, const Part *part, int64_t number, const int64_t *chosen,
                 int64_t at, int64_t count, int64_t first) {
    const float *products = room->products + first % PANEL;
    float *limits = room->limits + first;
    Lanes most = LOAD(room->most + first), limit = LOAD(limits);
    int64_t inside = at;
    for (int64_t k = 0; k < count; k++, products += PANEL) {
        Lanes here = LOAD(products);
        most = inside++ ? LARGER(most, here) : here;
        if (inside < sizes->size) continue;
        unsigned reaches = REACHES(most, limit);
        if (reaches) {
            float scores[LANES];
            STORE(scores, most);
            for (int64_t lane = 0; lane < LANES; lane++)
                if (reaches >> lane & 1) {
                    int64_t row = (first + lane) * sizes->k;
                    insert(&room->best, row, sizes->k, scores[lane], part->ids ? part->ids[*chosen] : *chosen,
                           number * PARTED + *chosen);
                    limits[lane] = room->best.scores[row + sizes->k - 1];
                }
            limit = LOAD(limits);
        }
        inside = 0, chosen++;
    }
    STORE(room->most + first, most);
}

/* Where the `count` keys of the blocks `chosen` are side by side in float32, from place `at` of the first on. */
static const float *side_by_side(const Room *room, const Sizes *sizes, const Part *part, const int64_t *chosen,
                                 int64_t at, int64_t count, int adjacent) {
    int64_t dim = sizes->dim;
    if (adjacent && !sizes->half) return (const float *)part->keys + (*chosen * sizes->size + at) * dim;
    for (int64_t k = 0; k < count; k++) {
        int64_t from = (chosen[(at + k) / sizes->size] * sizes->size + (at + k) % sizes->size) * dim;
        float *to = room->keys + k * dim;
        if (sizes->half)
            for (int64_t d = 0; d < dim; d++) to[d] = widened(((const uint16_t *)part->keys)[from + d]);
        else
            memcpy(to, (const float *)part->keys + from, (size_t)dim * sizeof *to);
    }
    return room->keys;
}

/* The blocks from `from` to before `to` of one part. */
static void search_part(const Room *room, const Sizes *sizes, const Part *part, int64_t number, int64_t from, int64_t to) {
    int64_t dim = sizes->dim, rows = sizes->rows, most = TILE > sizes->size ? TILE / sizes->size : 1;
    while (from < to) {
        int64_t chosen[TILE], blocks = 0;
        for (; from < to && blocks < most; from++)
            if (!part->wanted || part->wanted[from]) chosen[blocks++] = from;
        for (int64_t at = 0; at < blocks * sizes->size; at += TILE) {
            int64_t left = blocks * sizes->size - at, count = left < TILE ? left : TILE;
            int adjacent = chosen[blocks - 1] - *chosen == blocks - 1;
            const float *keys = side_by_side(room, sizes, part, chosen, at, count, adjacent);
            for (int64_t first = 0; first < rows; first += PANEL) {
                const float *queries = room->queries + first * dim;
                int vectors = rows <= FEW || rows - first <= LANES ? 1 : WIDE;
                if (rows <= FEW)
                    multiply_few(keys, count, queries, rows, room->products, dim);
                else if (vectors == 1)
                    multiply_panel(keys, count, queries, room->products, dim, 1, TALL);
                else
                    multiply_panel(keys, count, queries, room->products, dim, WIDE, HEIGHT);
                for (int64_t lane = 0; lane < vectors * LANES; lane += LANES)
                    keep(room, sizes, part, number, chosen, at, count, first + lane);
            }
        }
    }
}

/* Score the best blocks of a query again, and put them in order; or only say where they are. */
static void settle(const Part *parts, const Sizes *sizes, const float *query, const Best *best, int64_t first) {
    for (int64_t i = 0; i < sizes->k && best->ids[first + i] >= 0; i++) {
        const Part *part = parts + best->offsets[first + i] / PARTED;
        int64_t id = best->ids[first + i], block = best->offsets[first + i] % PARTED, offset;
        if (sizes->settle == NO) {
            best->offsets[first + i] = part->place + block;
            continue;
        }
        float score = best_key(part, sizes, block * sizes->size, query, &offset);
        best->scores[first + i] = -INFINITY, best->ids[first + i] = best->offsets[first + i] = -1;
        insert(best, first, i + 1, score, id, offset);
    }
}

/* Queries are [rows, dim] float32; `best` has [threads, rows, k], of which the first are the result. Returns 0, or -1
 * where there was no memory. */
int memstore_search(const Part *parts, int64_t count, const Sizes *sizes, const float *queries, const Best *best,
                    int64_t threads) {
    int64_t rows = sizes->rows, dim = sizes->dim, places = (rows + PANEL - 1) / PANEL * PANEL;
    int64_t each = 2 * places + TILE * (PANEL + dim);
    float *packed = calloc((size_t)(places * dim + threads * each), sizeof *packed);
    if (!packed) return -1;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < dim; d++)
            packed[rows <= FEW ? row * dim + d : (row / PANEL * dim + d) * PANEL + row % PANEL] = queries[row * dim + d];
#pragma omp parallel for num_threads((int)threads)
    for (int64_t share = 0; share < threads; share++) {
        float *limits = packed + places * dim + share * each;
        int64_t lists = share * rows * sizes->k;
        Room room = {packed, limits, limits + places, limits + 2 * places, limits + 2 * places + TILE * PANEL,
                     {best->scores + lists, best->ids + lists, best->offsets + lists}};
        for (int64_t row = 0; row < places; row++) limits[row] = row < rows ? -INFINITY : INFINITY;
        for (int64_t part = 0; part < count; part++)
            search_part(&room, sizes, parts + part, part, parts[part].blocks * share / threads,
                        parts[part].blocks * (share + 1) / threads);
    }
    free(packed);
    for (int64_t i = rows * sizes->k; i < threads * rows * sizes->k; i++)
        if (best->ids[i] >= 0)
            insert(best, i / sizes->k % rows * sizes->k, sizes->k, best->scores[i], best->ids[i], best->offsets[i]);
    for (int64_t row = 0; row < rows; row++) settle(parts, sizes, queries + row * dim, best, row * sizes->k);
    return 0;
}

/* Row `row` of `lists` [rows, count] has the parts that query `row` looks into. Only ids from `first` to before `stop`
 * and, unless it is NULL, `wanted`. */
void memstore_search_lists(const Part *parts, const int64_t *lists, int64_t count, int64_t first, int64_t stop,
                           const uint8_t *wanted, const Sizes *sizes, const float *queries, const Best *best,
                           int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t row = 0; row < sizes->rows; row++)
        for (const int64_t *list = lists + row * count; list < lists + (row + 1) * count; list++) {
            const Part *part = parts + *list;
            for (int64_t block = 0; block < part->blocks; block++) {
                int64_t id = part->ids[block], offset;
                if (id < first || id >= stop || (wanted && !wanted[id])) continue;
                float score = best_key(part, sizes, block * sizes->size, queries + row * sizes->dim, &offset);
                insert(best, row * sizes->k, sizes->k, score, id, offset);
            }
        }
}
