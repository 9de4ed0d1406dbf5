/* The best blocks, in one pass over the keys: what native.py says.
 *
 * Each key is read from memory once. Some keys at a time are widened to float32 where they are bfloat16, and multiplied
 * with all queries: one by one if there are few, else side by side in the lanes of vectors, where no sum is taken across
 * a vector. Only blocks that are as good as the last of the best are put among them, so nearly all products stay in the
 * processor's cache. At the end the best blocks are scored once more, always in the same order of sums.
 *
 * A block is as good as its best key; of equal blocks the smaller id comes first. Either all queries look into all
 * parts, or each into its own.
 *
 * Blocks whose keys also have codes of 8 bits are sifted: products of codes say which groups of blocks can hold a best
 * one (index/sieve.py has the proof). Only their keys are read, and scored once, as at the end.
 */

#include <float.h>
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
    const int8_t *codes;   /* [groups, keys of a group, dim] of the first blocks */
    const float *scales, *lost, *longest; /* [groups] */
    int64_t blocks;
    int64_t place; /* of the first block */
    int64_t groups;
} Part;

typedef struct {
    int64_t size, dim, rows, k;
    int64_t half;   /* whether keys are bfloat16 */
    int64_t settle; /* how the best are scored again; NO: not, and places are returned instead of offsets */
    int64_t paying; /* products from which another thread pays */
} Sizes;

enum { NO, VECTORS, IN_ORDER };

typedef struct { /* [rows, k] each, best first; -infinity, -1 and -1 where there are no more */
    float *scores;
    int64_t *ids;
    int64_t *offsets; /* of the best key in its block; until the end, part * PARTED + block */
} Best;

#define PARTED ((int64_t)1 << 32)

#define LARGER_OF(a, b) ((a) > (b) ? (a) : (b)) /* fmax is a call */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

/* Score the best blocks of a query again, and put them in order; or only say where they are. Where `mixed`, blocks that
 * are scored one by one will stand among them. */
static void settle(const Part *parts, const Sizes *sizes, const float *query, const Best *best, int64_t first, int mixed) {
    for (int64_t i = 0; i < sizes->k && best->ids[first + i] >= 0; i++) {
        const Part *part = parts + best->offsets[first + i] / PARTED;
        int64_t id = best->ids[first + i], block = best->offsets[first + i] % PARTED, offset;
        if (sizes->settle == NO && !mixed) {
            best->offsets[first + i] = part->place + block;
            continue;
        }
        float score = best_key(part, sizes, block * sizes->size, query, &offset);
        best->scores[first + i] = -INFINITY, best->ids[first + i] = best->offsets[first + i] = -1;
        insert(best, first, i + 1, score, id, sizes->settle == NO ? part->place + block : offset);
    }
}

static void clear(const Best *best, int64_t count) {
    for (int64_t i = 0; i < count; i++) best->scores[i] = -INFINITY, best->ids[i] = best->offsets[i] = -1;
}

static Best from_row(const Best *best, int64_t row, int64_t k) {
    return (Best){best->scores + row * k, best->ids + row * k, best->offsets + row * k};
}

/* Lists for `rows` more queries; no scores where there is no memory. */
static Best more_lists(int64_t rows, int64_t k) {
    int64_t *ids = malloc((size_t)(rows * k) * (2 * sizeof *ids + sizeof(float)) + 1);
    return ids ? (Best){(float *)(void *)(ids + 2 * rows * k), ids, ids + rows * k} : (Best){NULL, NULL, NULL};
}

/* Blocks of a part before this one are sifted by their codes, in groups of `of_group`. */
static int64_t sifted(const Part *part, int64_t of_group) { return part->groups * of_group; }

/* Search all blocks that are not sifted. Returns 0, or -1 where there was no memory. */
static int scan(const Part *parts, int64_t count, const Sizes *sizes, const float *queries, const Best *best,
                int64_t threads, int64_t of_group) {
    int64_t rows = sizes->rows, dim = sizes->dim, places = (rows + PANEL - 1) / PANEL * PANEL, blocks = 0;
    int64_t each = 2 * places + TILE * (PANEL + dim);
    clear(best, rows * sizes->k);
    for (int64_t part = 0; part < count; part++) blocks += parts[part].blocks - sifted(parts + part, of_group);
    if (!blocks) return 0;
    threads = least(threads, 1 + rows * blocks * sizes->size * dim / sizes->paying);
    float *packed = calloc((size_t)(places * dim + threads * each), sizeof *packed);
    Best others = more_lists((threads - 1) * rows, sizes->k);
    int failed = !packed || !others.scores;
    if (!failed) {
        clear(&others, (threads - 1) * rows * sizes->k);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t d = 0; d < dim; d++)
                packed[rows <= FEW ? row * dim + d : (row / PANEL * dim + d) * PANEL + row % PANEL] = queries[row * dim + d];
#pragma omp parallel for num_threads((int)threads)
        for (int64_t share = 0; share < threads; share++) {
            float *limits = packed + places * dim + share * each;
            Room room = {packed, limits, limits + places, limits + 2 * places, limits + 2 * places + TILE * PANEL,
                         share ? from_row(&others, (share - 1) * rows, sizes->k) : *best};
            for (int64_t row = 0; row < places; row++) limits[row] = row < rows ? -INFINITY : INFINITY;
            for (int64_t part = 0; part < count; part++) {
                int64_t first = sifted(parts + part, of_group), more = parts[part].blocks - first;
                search_part(&room, sizes, parts + part, part, first + more * share / threads,
                            first + more * (share + 1) / threads);
            }
        }
        for (int64_t i = 0; i < (threads - 1) * rows * sizes->k; i++)
            if (others.ids[i] >= 0)
                insert(best, i / sizes->k % rows * sizes->k, sizes->k, others.scores[i], others.ids[i], others.offsets[i]);
        for (int64_t row = 0; row < rows; row++) settle(parts, sizes, queries + row * dim, best, row * sizes->k, of_group > 0);
    }
    free(packed);
    free(others.ids);
    return -failed;
}

/* ---- codes of 8 bits ---- */

typedef int Products(const int8_t *codes, const int64_t *chosen, const int8_t *queries, float *out, long groups,
                     long keys, long dim, long rows, long threads, int with_amx);

typedef struct { /* the coordinates of codes, and what they lose: see index/sieve.py */
    const float *centre; /* [dim] */
    const double *back;  /* [dim, dim], or NULL */
    Products *products;  /* of best_products/native.c */
    int64_t matrices;    /* whether AMX may be used */
    int64_t of_group;    /* blocks */
    int64_t share;       /* one group in so many may be looked into for a query */
    float reach, apart;  /* the length of the longest key in the frame, and outside of it */
} Frame;

#define AT_ONCE 64

typedef struct { /* for some queries */
    const Part *parts;
    const Sizes *sizes;
    const Frame *frame;
    const float *queries; /* [rows, dim] */
    Best best;            /* [rows, k] */
    Best promising;       /* [rows, k]: groups, in place of ids */
    int64_t count, rows, groups;
    float *products; /* [groups, rows]: the best of each group, before its scale; -infinity: none is wanted */
    int8_t *codes;   /* [rows, dim] */
    int16_t *wide;   /* the same */
    /* In units of the code of each query, as all products of codes are: */
    float lengths[AT_ONCE + LANES], lost[AT_ONCE + LANES], limits[AT_ONCE + LANES];
    float floors[AT_ONCE]; /* what the keys of k groups reach */
    double scales[AT_ONCE], apart[AT_ONCE], rounding[AT_ONCE];
    int64_t looks[AT_ONCE];
} Sieve;

static void encode(Sieve *sieve, int64_t row) {
    int64_t dim = sieve->sizes->dim;
    const float *query = sieve->queries + row * dim;
    const double *back = sieve->frame->back;
    double turned[dim], length = 0, lost = 0, own = 0, apart = 0;
    float most = 0;
    for (int64_t i = 0; i < dim; i++) {
        own += (double)query[i] * query[i];
        apart += (double)query[i] * sieve->frame->centre[i];
        turned[i] = back ? 0 : query[i];
    }
    for (int64_t i = 0; back && i < dim; i++)
        for (int64_t j = 0; j < dim; j++) turned[j] += query[i] * back[i * dim + j];
    for (int64_t i = 0; i < dim; i++) most = LARGER_OF(most, fabsf((float)turned[i]));
    double scale = LARGER_OF((double)most / 127, FLT_MIN);
    for (int64_t i = 0; i < dim; i++) {
        double number = turned[i] / scale, code = -LARGER_OF(-127, -LARGER_OF(-127, rint(number)));
        sieve->codes[row * dim + i] = (int8_t)code;
        sieve->wide[row * dim + i] = (int16_t)code;
        length += number * number;
        lost += (number - code) * (number - code);
    }
    sieve->lengths[row] = (float)sqrt(length);
    sieve->lost[row] = (float)sqrt(lost);
    sieve->scales[row] = scale;
    sieve->apart[row] = apart;
    /* How far sums of float32 can be apart, here and in scores. */
    sieve->rounding[row] = (sqrt(own) / scale * sieve->frame->apart + sqrt(length) * sieve->frame->reach) *
                           (4.0 * (double)(dim + 8) / (1 << 24));
    sieve->floors[row] = -INFINITY;
    sieve->looks[row] = 0;
}

/* The product of codes that a block must reach. The limit is a true score, so only this product is in doubt. */
static float limit_of(const Sieve *sieve, int64_t row) {
    int64_t last = (row + 1) * sieve->sizes->k - 1;
    double limit = sieve->best.ids[last] < 0 ? -INFINITY : sieve->best.scores[last];
    limit = (limit - sieve->apart[row]) / sieve->scales[row];
    limit = LARGER_OF(limit, sieve->floors[row]) - sieve->rounding[row];
    return (float)LARGER_OF(limit, -FLT_MAX); /* above -infinity, the product of groups that need no look */
}

/* The products of a query's code with those of four keys, before the scale of their group. */
static void code_products(const int8_t *const keys[4], const int16_t *query, int64_t dim, int32_t *products) {
    int64_t d = 0;
#if LANES > 4
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (; d + 16 <= dim; d += 16) {
        __m256i asked = _mm256_loadu_si256((const __m256i *)(const void *)(query + d));
        for (int k = 0; k < 4; k++) {
            __m256i key = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(keys[k] + d)));
            sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(key, asked));
        }
    }
    __m256i four = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    _mm_storeu_si128((__m128i *)(void *)products,
                     _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
#else
    memset(products, 0, 4 * sizeof *products);
#endif
    for (; d < dim; d++)
        for (int k = 0; k < 4; k++) products[k] += keys[k][d] * query[d];
}

static float doubt(const Sieve *sieve, int64_t row, const Part *part, int64_t group) {
    return (sieve->lengths[row] * part->lost[group] + sieve->lost[row] * part->longest[group]) * 1.0001f;
}

static void ask_for(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const char *)from + at);
}

/* Put the blocks of a group that reach the limit among the best of a query. */
static void look(Sieve *sieve, int64_t row, const Part *part, int64_t group) {
    const Sizes *sizes = sieve->sizes;
    int64_t of_group = sieve->frame->of_group, keys = of_group * sizes->size, dim = sizes->dim, done = -1, offset;
    int64_t first = group * of_group, bytes = sizes->size * dim * (sizes->half ? 2 : 4);
    const int8_t *codes = part->codes + group * keys * dim;
    const float limit = limit_of(sieve, row), beside = doubt(sieve, row, part, group);
    int32_t products[keys + 4];
    for (int64_t key = 0; key < keys; key += 4) {
        const int8_t *four[4];
        for (int i = 0; i < 4; i++) four[i] = codes + least(key + i, keys - 1) * dim;
        code_products(four, sieve->wide + row * dim, dim, products + key);
    }
    for (int64_t key = 0; key < keys; key++)
        if ((float)products[key] * part->scales[group] + beside >= limit)
            ask_for((const char *)part->keys + (first + key / sizes->size) * bytes, least(bytes, AHEAD));
    for (int64_t key = 0; key < keys; key++) {
        int64_t block = first + key / sizes->size;
        if (!((float)products[key] * part->scales[group] + beside >= limit)) continue;
        if (block == done || (part->wanted && !part->wanted[block])) continue;
        float score = best_key(part, sizes, block * sizes->size, sieve->queries + row * dim, &offset);
        insert(&sieve->best, row * sizes->k, sizes->k, score, part->ids ? part->ids[block] : block,
               sizes->settle == NO ? part->place + block : offset);
        done = block;
    }
}

/* The best product of codes of each group; only of wanted ones. */
static int multiply_codes(Sieve *sieve, int64_t threads) {
    const Sizes *sizes = sieve->sizes;
    int64_t of_group = sieve->frame->of_group, keys = of_group * sizes->size;
    float *out = sieve->products;
    for (const Part *part = sieve->parts; part < sieve->parts + sieve->count; part++) {
        for (int64_t from = 0, to; from < part->groups; from = to) {
            const uint8_t *wanted = part->wanted ? part->wanted + from * of_group : NULL;
            int64_t step = part->wanted ? least(AT_ONCE, part->groups - from) : part->groups;
            to = from + step;
            if (wanted && !memchr(wanted, 1, (size_t)(step * of_group))) {
                for (int64_t i = from * sieve->rows; i < to * sieve->rows; i++) out[i] = -INFINITY;
                continue;
            }
            if (sieve->frame->products(part->codes + from * keys * sizes->dim, NULL, sieve->codes, out + from * sieve->rows,
                                       step, keys, sizes->dim, sieve->rows,
                                       least(threads, 1 + 4 * step * keys * sizes->dim / sizes->paying),
                                       (int)sieve->frame->matrices))
                return -1;
        }
        out += part->groups * sieve->rows;
    }
    return 0;
}

/* Look into the most promising groups of a query first: they hold most of its best blocks, so others need not be. */
static void promise(Sieve *sieve, int64_t row) {
    int64_t k = sieve->sizes->k, of_group = sieve->frame->of_group;
    const Part *parts[k];
    int64_t groups[k];
    float floor = INFINITY;
    for (int64_t i = 0; i < k; i++) {
        groups[i] = sieve->promising.ids[row * k + i];
        parts[i] = sieve->parts;
        for (; groups[i] >= 0 && groups[i] >= parts[i]->groups; parts[i]++) groups[i] -= parts[i]->groups;
        float reached = -INFINITY; /* its best product can be that of a block that is not wanted */
        if (groups[i] >= 0 && !(parts[i]->wanted && memchr(parts[i]->wanted + groups[i] * of_group, 0, (size_t)of_group)))
            reached = sieve->promising.scores[row * k + i] - doubt(sieve, row, parts[i], groups[i]);
        floor = reached < floor ? reached : floor;
    }
    sieve->floors[row] = floor;
    int64_t bytes = of_group * sieve->sizes->size * sieve->sizes->dim;
    for (int64_t i = 0; i < k && groups[i] >= 0; i++) {
        if (i + 1 < k && groups[i + 1] >= 0) ask_for(parts[i + 1]->codes + groups[i + 1] * bytes, least(bytes, AHEAD));
        look(sieve, row, parts[i], groups[i]);
        sieve->products[sieve->promising.ids[row * k + i] * sieve->rows + row] = -INFINITY;
    }
    sieve->limits[row] = limit_of(sieve, row);
}

/* Sift for the queries from `first` on that stand in one vector. */
static void sift_lanes(Sieve *sieve, int64_t first) {
    int64_t k = sieve->sizes->k, number = 0, lanes = least(LANES, sieve->rows - first);
    const float *products = sieve->products + first;
    float least_of_best[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) least_of_best[lane] = lane < lanes ? -INFINITY : INFINITY;
    for (const Part *part = sieve->parts; part < sieve->parts + sieve->count; part++)
        for (int64_t group = 0; group < part->groups; group++, number++, products += sieve->rows) {
            Lanes here = LOAD(products) * SPREAD(part->scales[group]);
            unsigned reaches = REACHES(here, LOAD(least_of_best));
            float scores[LANES];
            if (reaches) STORE(scores, here);
            for (; reaches; reaches &= reaches - 1) {
                int64_t lane = __builtin_ctz(reaches), list = (first + lane) * k;
                insert(&sieve->promising, list, k, scores[lane], number, 0);
                least_of_best[lane] = sieve->promising.scores[list + k - 1];
            }
        }
    for (int64_t row = first; row < first + lanes; row++) promise(sieve, row);
    Lanes lengths = LOAD(sieve->lengths + first) * SPREAD(1.0001f), lost = LOAD(sieve->lost + first) * SPREAD(1.0001f);
    products = sieve->products + first;
    for (const Part *part = sieve->parts; part < sieve->parts + sieve->count; part++)
        for (int64_t group = 0; group < part->groups; group++, products += sieve->rows) {
            Lanes doubts = FUSED(lengths, SPREAD(part->lost[group]), lost * SPREAD(part->longest[group]));
            Lanes highest = FUSED(LOAD(products), SPREAD(part->scales[group]), doubts);
            unsigned reaches = REACHES(highest, LOAD(sieve->limits + first));
            for (; reaches; reaches &= reaches - 1) {
                int64_t row = first + __builtin_ctz(reaches);
                look(sieve, row, part, group);
                int enough = ++sieve->looks[row] * sieve->frame->share > sieve->groups;
                sieve->limits[row] = enough ? INFINITY : limit_of(sieve, row);
            }
        }
}

/* Search what has codes, for at most AT_ONCE queries; `best` has what else was found. Returns 0, or -1 where there was
 * no memory. */
static int sift(const Part *parts, int64_t count, const Sizes *sizes, const float *queries, const Best *best,
                int64_t threads, const Frame *frame, int64_t groups) {
    int64_t rows = sizes->rows, dim = sizes->dim, k = sizes->k;
    Sieve sieve = {.parts = parts, .sizes = sizes, .frame = frame, .queries = queries, .best = *best, .count = count,
                   .rows = rows, .groups = groups, .promising = more_lists(rows, k)};
    sieve.products = malloc((size_t)(groups * rows + LANES) * sizeof(float)); /* vectors reach beyond the end */
    sieve.wide = malloc((size_t)(rows * dim) * 3);
    int failed = !sieve.products || !sieve.wide || !sieve.promising.scores;
    if (!failed) {
        sieve.codes = (int8_t *)(sieve.wide + rows * dim);
        clear(&sieve.promising, rows * k);
        for (int64_t i = 0; i < LANES; i++) sieve.products[groups * rows + i] = -INFINITY;
        for (int64_t row = 0; row < AT_ONCE + LANES; row++) sieve.limits[row] = INFINITY;
        for (int64_t row = 0; row < rows; row++) encode(&sieve, row);
        failed = multiply_codes(&sieve, threads);
    }
    if (!failed) {
        int64_t several = least(threads, 1 + groups * rows * 32 / sizes->paying);
#pragma omp parallel for num_threads((int)several) schedule(dynamic)
        for (int64_t row = 0; row < rows; row += LANES) sift_lanes(&sieve, row);
    }
    for (int64_t row = 0; row < rows && !failed; row++) { /* too many groups were left: the keys are read instead */
        Sizes one = *sizes;
        Best here = from_row(best, row, k);
        one.rows = 1;
        if (sieve.looks[row] * frame->share > groups)
            failed = scan(parts, count, &one, queries + row * dim, &here, threads, 0);
    }
    free(sieve.products);
    free(sieve.wide);
    free(sieve.promising.ids);
    return -(failed != 0);
}

typedef struct {
    const Part *parts;     /* [heads, count] */
    const Frame *frames;   /* [heads], or NULL: codes are not read */
    const float *queries;  /* [heads, rows, dim] */
    Best best;             /* [heads, rows, k], to be filled */
    int64_t heads, count;
    Sizes sizes;
    int64_t threads;
    float largest; /* that a number of a query may be, if this is not 0 */
} Search;

/* Returns 0, -1 where there was no memory, or -2 where a number of a query is too large, or none. */
int memstore_search(const Search *search) {
    const Sizes *sizes = &search->sizes;
    int wrong = 0;
    for (int64_t i = 0; search->largest > 0 && i < search->heads * sizes->rows * sizes->dim; i++)
        wrong |= !(fabsf(search->queries[i]) <= search->largest);
    if (wrong) return -2;
    for (int64_t head = 0; head < search->heads; head++) {
        const Part *parts = search->parts + head * search->count;
        const Frame *frame = search->frames ? search->frames + head : NULL;
        const float *queries = search->queries + head * sizes->rows * sizes->dim;
        Best best = from_row(&search->best, head * sizes->rows, sizes->k);
        int64_t groups = 0;
        for (int64_t part = 0; frame && part < search->count; part++) groups += parts[part].groups;
        if (scan(parts, search->count, sizes, queries, &best, search->threads, groups ? frame->of_group : 0)) return -1;
        for (int64_t row = 0; groups && row < sizes->rows; row += AT_ONCE) {
            Sizes some = *sizes;
            Best here = from_row(&best, row, sizes->k);
            some.rows = least(AT_ONCE, sizes->rows - row);
            if (sift(parts, search->count, &some, queries + row * sizes->dim, &here, search->threads, frame, groups))
                return -1;
        }
    }
    return 0;
}

/* Row `row` of `lists` [rows, count] has the parts that query `row` looks into. Only ids from `first` to before `stop`
 * and, unless it is NULL, `wanted`. */
void memstore_search_lists(const Part *parts, const int64_t *lists, int64_t count, int64_t first, int64_t stop,
                           const uint8_t *wanted, const Sizes *sizes, const float *queries, const Best *best,
                           int64_t threads) {
    clear(best, sizes->rows * sizes->k);
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
