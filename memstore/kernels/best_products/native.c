/* The largest product of each group of keys with each query, in 8 bits: what the package says, for x86-64 processors.
 *
 * Three ways, of which the fastest that the processor has is taken:
 *
 * - AMX: a tile holds 16 keys, another 16 queries, and one instruction multiplies them over up to 64 numbers. Sums go
 *   through a small buffer, where the largest of 16 keys is taken for 16 queries at once.
 * - AVX-512 VNNI: a vector holds four numbers of each of 16 queries; four numbers of a key are broadcast against it. The
 *   instruction wants one side without a sign, so keys are raised by 128, and sums begin at -128 times the sum of the
 *   query.
 * - AVX2: the same with two numbers of each of eight queries in 16 bits, and with keys widened to 16 bits. Its own
 *   instruction for 8 bits cuts large sums off.
 *
 * Queries are packed as [LANES queries at a time][TOGETHER numbers at a time][query][number], zeros behind the last.
 * If they do not fill half a vector or a quarter, it holds twice or four times as many numbers of each (`fold`), and
 * neighbouring sums are added at the end.
 *
 * Keys that are left over at the end of a group are taken together with some before them: a maximum does not mind.
 */

#include <immintrin.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __AVX512VNNI__
#define LANES 16
#define TOGETHER 4
#define WIDEST 4 /* vectors of queries at a time, as many as registers hold the sums of */
typedef int8_t Number;
typedef __m512i Vector;
#define LOAD _mm512_loadu_si512
#define STORE _mm512_storeu_si512
#define SPREAD _mm512_set1_epi32
#define SPREAD_TWO _mm512_set1_epi64
#define SPREAD_FOUR(from) _mm512_broadcast_i32x4(_mm_loadu_si128(from))
#define SWAP _mm512_shuffle_epi32
#define PAIRS _MM_PERM_CDAB
#define HALVES _MM_PERM_BADC
#define ADD _mm512_add_epi32
#define LARGER _mm512_max_epi32
#define ADD_PRODUCTS(sum, key, queries) \
    _mm512_dpbusd_epi32(sum, _mm512_xor_si512(key, SPREAD((int32_t)0x80808080)), queries)
#else
#define LANES 8
#define TOGETHER 2
#define WIDEST 2
typedef int16_t Number;
typedef __m256i Vector;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(const void *)(from))
#define STORE(to, x) _mm256_storeu_si256((__m256i *)(void *)(to), x)
#define SPREAD _mm256_set1_epi32
#define SPREAD_TWO _mm256_set1_epi64x
#define SPREAD_FOUR(from) _mm256_broadcastsi128_si256(_mm_loadu_si128(from))
#define SWAP _mm256_shuffle_epi32
#define PAIRS 0xB1
#define HALVES 0x4E
#define ADD _mm256_add_epi32
#define LARGER _mm256_max_epi32
#define ADD_PRODUCTS(sum, key, queries) ADD(sum, _mm256_madd_epi16(key, queries))
#endif

typedef struct {
    const int8_t *codes;  /* [groups there are, keys, dim] */
    const int64_t *chosen; /* [groups], or NULL: the first ones */
    const Number *packed; /* [blocks, dim / TOGETHER, LANES, TOGETHER] */
    const int32_t *start; /* [blocks, LANES]: where sums begin with VNNI; with AVX2 they begin at 0 */
    int16_t *widened;     /* [keys, dim], with AVX2 */
    float *out;           /* [groups, rows] */
    long groups, keys, dim, rows, blocks;
    int fold; /* 1, 2 or 4 */
    int amx;
} Work;

static const int8_t *keys_of(const Work *work, long group) {
    return work->codes + (work->chosen ? work->chosen[group] : group) * work->keys * work->dim;
}

static void keep(const Work *work, long group, long block, Vector best) {
    long left = work->rows - block * LANES;
    float *to = work->out + group * work->rows + block * LANES;
#ifdef __AVX512VNNI__
    if (work->fold == 1) {
        __mmask16 mask = left >= LANES ? 0xFFFF : (__mmask16)((1u << left) - 1);
        _mm512_mask_storeu_ps(to, mask, _mm512_cvtepi32_ps(best));
        return;
    }
#endif
    int32_t found[LANES];
    STORE(found, best);
    for (long row = 0; row < left && row < LANES; row++) to[row] = (float)found[row * work->fold];
}

/* ---- AVX-512 VNNI, AVX2 ---- */

/* `fold` times TOGETHER numbers of a key, for each query. */
static inline __attribute__((always_inline)) Vector spread(const Number *key, const int fold) {
    if (fold == 4) return SPREAD_FOUR((const __m128i *)(const void *)key);
    int64_t two = 0;
    memcpy(&two, key, fold == 2 ? 8 : 4);
    return fold == 2 ? SPREAD_TWO(two) : SPREAD((int32_t)two);
}

/* The largest products of `count` keys with `wide` vectors of queries, beyond `best`. The numbers are constants. */
static inline __attribute__((always_inline)) void some_keys(
    const Work *work, const Number *keys, long block, const int wide, const int count, const int fold, Vector *best) {
    Vector sums[8][WIDEST];
    for (int w = 0; w < wide; w++)
        for (int k = 0; k < count; k++) sums[k][w] = LOAD(work->start + (block + w) * LANES);
    for (long d = 0; d < work->dim; d += fold * TOGETHER) {
        Vector queries[WIDEST];
        for (int w = 0; w < wide; w++) queries[w] = LOAD(work->packed + ((block + w) * work->dim + d) * LANES / fold);
        for (int k = 0; k < count; k++) {
            Vector key = spread(keys + k * work->dim + d, fold);
            for (int w = 0; w < wide; w++) sums[k][w] = ADD_PRODUCTS(sums[k][w], key, queries[w]);
        }
    }
    for (int k = 0; k < count; k++)
        for (int w = 0; w < wide; w++) {
            if (fold > 1) sums[k][w] = ADD(sums[k][w], SWAP(sums[k][w], PAIRS));
            if (fold > 2) sums[k][w] = ADD(sums[k][w], SWAP(sums[k][w], HALVES));
            best[w] = LARGER(best[w], sums[k][w]);
        }
}

/* `count`: keys at a time, enough to hide how long an addition takes. */
static inline __attribute__((always_inline)) void one_group(
    const Work *work, const Number *keys, long group, long block, const int wide, const int count, const int fold) {
    Vector best[WIDEST];
    for (int w = 0; w < wide; w++) best[w] = SPREAD(INT_MIN);
    if (work->keys < count) {
        for (long k = 0; k < work->keys; k++) some_keys(work, keys + k * work->dim, block, wide, 1, fold, best);
    } else {
        for (long k = 0; k < work->keys; k += count) {
            long from = k + count <= work->keys ? k : work->keys - count;
            some_keys(work, keys + from * work->dim, block, wide, count, fold, best);
        }
    }
    for (int w = 0; w < wide; w++) keep(work, group, block + w, best[w]);
}

static void by_vectors(const Work *work) {
    for (long group = 0; group < work->groups; group++) {
        long block = 0;
#ifdef __AVX512VNNI__
        const Number *keys = keys_of(work, group);
        for (; block + 4 <= work->blocks; block += 4) one_group(work, keys, group, block, 4, 4, 1);
#else
        const Number *keys = work->widened;
        for (long i = 0; i < work->keys * work->dim; i++) work->widened[i] = keys_of(work, group)[i];
#endif
        for (; block + 2 <= work->blocks; block += 2) one_group(work, keys, group, block, 2, 4, 1);
        if (block == work->blocks) continue;
#define LAST(fold) (work->keys < 8 ? one_group(work, keys, group, block, 1, 4, fold) : one_group(work, keys, group, block, 1, 8, fold))
        if (work->fold == 4)
            LAST(4);
        else if (work->fold == 2)
            LAST(2);
        else
            LAST(1);
#undef LAST
    }
}

/* ---- AMX ---- */

#ifdef __AMX_INT8__

#define REQUEST_PERMISSION 0x1023
#define TILE_DATA 18

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) Tiles;

static int amx_allowed(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

/* Numbers of a key that go into a tile: all steps have the same. */
static long amx_step(long dim) {
    long steps = (dim + 63) / 64;
    while (dim % steps || dim / steps % 4) steps++;
    return dim / steps;
}

/* The largest products of `tall` times 16 keys with `wide` times 16 queries, beyond `best`. Both are 1 or 2, constants.
 * Tiles 0 to 3 are sums, 4 and 5 keys, 6 and 7 queries. */
static inline __attribute__((always_inline)) void amx_keys(
    const Work *work, const int8_t *first, const int8_t *second, const int8_t *queries, long step, long height,
    const int tall, const int wide, __m512i *best) {
    int32_t sums[4][16][LANES] __attribute__((aligned(64)));
    _tile_zero(0);
    if (tall == 2) _tile_zero(1);
    if (wide == 2) _tile_zero(2);
    if (tall == 2 && wide == 2) _tile_zero(3);
    for (long d = 0; d < work->dim; d += step) {
        _tile_loadd(4, first + d, work->dim);
        _tile_loadd(6, queries + d * LANES, 64);
        _tile_dpbssd(0, 4, 6);
        if (tall == 2) {
            _tile_loadd(5, second + d, work->dim);
            _tile_dpbssd(1, 5, 6);
        }
        if (wide == 2) {
            _tile_loadd(7, queries + (work->dim + d) * LANES, 64);
            _tile_dpbssd(2, 4, 7);
        }
        if (tall == 2 && wide == 2) _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    if (tall == 2) _tile_stored(1, sums[1], 64);
    if (wide == 2) _tile_stored(2, sums[2], 64);
    if (tall == 2 && wide == 2) _tile_stored(3, sums[3], 64);
    for (int tile = 0; tile < 4; tile++)
        if (tile % 2 < tall && tile / 2 < wide)
            for (long row = 0; row < height; row++)
                best[tile / 2] = _mm512_max_epi32(best[tile / 2], _mm512_load_si512(sums[tile][row]));
}

static inline __attribute__((always_inline)) void amx_group(
    const Work *work, long group, long block, long step, long height, const int wide) {
    const int8_t *keys = keys_of(work, group), *queries = work->packed + block * LANES * work->dim;
    __m512i best[2] = {_mm512_set1_epi32(INT_MIN), _mm512_set1_epi32(INT_MIN)};
    long last = work->keys - height;
    for (long k = 0; k < work->keys; k += 2 * height) {
        const int8_t *first = keys + (k < last ? k : last) * work->dim;
        if (k + height >= work->keys) {
            amx_keys(work, first, NULL, queries, step, height, 1, wide, best);
        } else {
            const int8_t *second = keys + (k + height < last ? k + height : last) * work->dim;
            amx_keys(work, first, second, queries, step, height, 2, wide, best);
        }
    }
    for (int w = 0; w < wide; w++) keep(work, group, block + w, best[w]);
}

static void amx(const Work *work) {
    long step = amx_step(work->dim), height = work->keys < 16 ? work->keys : 16;
    Tiles tiles = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        tiles.bytes[tile] = tile == 4 || tile == 5 ? (uint16_t)step : 64;
        tiles.rows[tile] = (uint8_t)(tile < 6 ? height : step / 4);
    }
    _tile_loadconfig(&tiles);
    for (long group = 0; group < work->groups; group++) {
        long block = 0;
        for (; block + 2 <= work->blocks; block += 2) amx_group(work, group, block, step, height, 2);
        if (block < work->blocks) amx_group(work, group, block, step, height, 1);
    }
    _tile_release();
}

#else

static int amx_allowed(void) { return 0; }
static void amx(const Work *work) { by_vectors(work); }

#endif

/* ---- all ---- */

/* One of several equal shares of the groups. */
static void run_share(Work work, long share, long shares) {
    long first = work.groups * share / shares, last = work.groups * (share + 1) / shares;
    if (work.chosen)
        work.chosen += first;
    else
        work.codes += first * work.keys * work.dim;
    work.out += first * work.rows;
    work.groups = last - first;
    work.widened += LANES == 8 ? share * work.keys * work.dim : 0;
    if (work.amx)
        amx(&work);
    else
        by_vectors(&work);
}

/* 1 where AMX can be used, else 0. */
int memstore_has_amx(void) { return amx_allowed(); }

/* codes [groups there are, keys, dim], chosen [groups] or NULL, queries [rows, dim], out [groups, rows]. dim is a
 * multiple of 4, no size is 0, and what is chosen is there.
 * Returns 0, or -1 where there was no memory for the queries. */
int memstore_best_products(
    const int8_t *codes, const int64_t *chosen, const int8_t *queries, float *out, long groups, long keys, long dim,
    long rows, long threads, int with_amx) {
    long blocks = (rows + LANES - 1) / LANES;
    int fold = with_amx || rows * 2 > LANES || dim % (2 * TOGETHER) ? 1 : rows * 4 > LANES || dim % (4 * TOGETHER) ? 2 : 4;
    long together = TOGETHER * fold;
    Number *packed = calloc((size_t)(blocks * LANES * dim), sizeof *packed);
    int32_t *start = calloc((size_t)(blocks * LANES), sizeof *start);
    int16_t *widened = malloc((size_t)(LANES == 8 ? threads * keys * dim : 1) * sizeof *widened);
    int failed = !packed || !start || !widened;
    for (long row = 0; row < rows && !failed; row++)
        for (long d = 0; d < dim; d++) {
            int8_t number = queries[row * dim + d];
            packed[(row / LANES * dim + d / together * TOGETHER) * LANES + row % LANES * together + d % together] = number;
            start[row * fold] -= LANES == 8 ? 0 : 128 * number;
        }
    if (!failed) {
        Work whole = {codes, chosen, packed, start, widened, out, groups, keys, dim, rows, blocks, fold, with_amx};
#pragma omp parallel for num_threads((int)threads)
        for (long share = 0; share < threads; share++) run_share(whole, share, threads);
    }
    free(packed);
    free(start);
    free(widened);
    return -failed;
}
