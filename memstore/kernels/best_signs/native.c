/* The largest product of each block of signs with each query: what the package says, for x86-64 processors with AVX-512 BW.
 *
 * Five signs of a key are the number of one of 32 entries of 16 bits, which are one vector: what those signs make of
 * five numbers of the query. One instruction finds the entries of 32 keys at once, and needs only the lowest five bits
 * of each word, so a word is shifted twice for its other ten. Sums stay within 16 bits, for entries are scaled by what
 * all numbers of a query could make together.
 *
 * The tables of a few queries fit into the first cache, and some blocks into the second: so these are gone through for
 * some queries after the others.
 */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define BITS 5
#define LANES 32
#define PER_WORD 3
#define LARGEST 32767
#define QUERIES 8
#define BLOCKS 128

typedef struct {
    const int16_t *words;  /* [blocks, tiles, numbers of words, LANES] */
    const int16_t *tables; /* [rows, entries, LANES] */
    const float *steps;    /* [rows]: what 1 of an entry is */
    float *out;            /* [blocks, rows] */
    long blocks, tiles, entries, rows;
} Work;

static float largest_of(__m512i words) {
    __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
    __m128i eight = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    /* The instruction finds the smallest without a sign: of all numbers turned round. */
    __m128i turned = _mm_sub_epi16(_mm_set1_epi16(LARGEST), eight);
    return (float)(LARGEST - (_mm_cvtsi128_si32(_mm_minpos_epu16(turned)) & 0xFFFF));
}

/* One entry of `count` queries, for the keys of one or two tiles. */
static inline __attribute__((always_inline)) void add_entry(
    const int16_t *table, long stride, __m512i first, __m512i second, const int count, const int tall,
    __m512i sums[QUERIES][2]) {
    for (int q = 0; q < count; q++) {
        __m512i entries = _mm512_loadu_si512(table + q * stride);
        sums[q][0] = _mm512_add_epi16(sums[q][0], _mm512_permutexvar_epi16(first, entries));
        if (tall == 2) sums[q][1] = _mm512_add_epi16(sums[q][1], _mm512_permutexvar_epi16(second, entries));
    }
}

/* The largest sums of one or two tiles with `count` queries, beyond `best`. Both numbers are constants. */
static inline __attribute__((always_inline)) void some_tiles(
    const Work *work, const int16_t *tile, long row, const int count, const int tall, __m512i *best) {
    long numbers = (work->entries + PER_WORD - 1) / PER_WORD, stride = work->entries * LANES;
    const int16_t *table = work->tables + row * stride;
    __m512i sums[QUERIES][2];
    for (int q = 0; q < count; q++) sums[q][0] = sums[q][1] = _mm512_setzero_si512();
    for (long word = 0; word < numbers; word++) {
        __m512i first = _mm512_loadu_si512(tile + word * LANES), second = first;
        if (tall == 2) second = _mm512_loadu_si512(tile + (numbers + word) * LANES);
        long left = work->entries - word * PER_WORD;
        add_entry(table, stride, first, second, count, tall, sums);
        if (left > 1)
            add_entry(
                table + LANES, stride, _mm512_srli_epi16(first, BITS), _mm512_srli_epi16(second, BITS), count, tall,
                sums);
        if (left > 2)
            add_entry(
                table + 2 * LANES, stride, _mm512_srli_epi16(first, 2 * BITS), _mm512_srli_epi16(second, 2 * BITS),
                count, tall, sums);
        table += PER_WORD * LANES;
    }
    for (int q = 0; q < count; q++) {
        best[q] = _mm512_max_epi16(best[q], sums[q][0]);
        if (tall == 2) best[q] = _mm512_max_epi16(best[q], sums[q][1]);
    }
}

static inline __attribute__((always_inline)) void some_queries(
    const Work *work, long begin, long end, long row, const int count) {
    long size = (work->entries + PER_WORD - 1) / PER_WORD * LANES;
    for (long block = begin; block < end; block++) {
        const int16_t *tile = work->words + block * work->tiles * size;
        __m512i best[QUERIES];
        for (int q = 0; q < count; q++) best[q] = _mm512_set1_epi16(-LARGEST - 1);
        long t = 0;
        for (; t + 2 <= work->tiles; t += 2) some_tiles(work, tile + t * size, row, count, 2, best);
        if (t < work->tiles) some_tiles(work, tile + t * size, row, count, 1, best);
        for (int q = 0; q < count; q++)
            work->out[block * work->rows + row + q] = largest_of(best[q]) * work->steps[row + q];
    }
}

/* Blocks from `begin` to `end`, for all queries. */
static void run_share(const Work *work, long begin, long end) {
    for (long first = begin; first < end; first += BLOCKS) {
        long last = first + BLOCKS < end ? first + BLOCKS : end, row = 0;
        for (; row + 8 <= work->rows; row += 8) some_queries(work, first, last, row, 8);
        switch (work->rows - row) {
        case 7: some_queries(work, first, last, row, 7); break;
        case 6: some_queries(work, first, last, row, 6); break;
        case 5: some_queries(work, first, last, row, 5); break;
        case 4: some_queries(work, first, last, row, 4); break;
        case 3: some_queries(work, first, last, row, 3); break;
        case 2: some_queries(work, first, last, row, 2); break;
        case 1: some_queries(work, first, last, row, 1); break;
        default: break;
        }
    }
}

/* The table of a query [dim], and what 1 of its entries is. Small whole numbers, such as signs, are left as they are. */
static float make_table(const float *query, long dim, long entries, int16_t *table) {
    double all = 0;
    int whole = 1;
    for (long d = 0; d < dim; d++) {
        all += fabs((double)query[d]);
        whole &= query[d] == rintf(query[d]);
    }
    double scale = whole && all <= LARGEST ? 1 : all > 0 ? (double)(LARGEST - entries) / all : 0;
    for (long entry = 0; entry < entries; entry++)
        for (int bits = 0; bits < LANES; bits++) {
            double sum = 0;
            for (int b = 0; b < BITS && entry * BITS + b < dim; b++)
                sum += bits >> b & 1 ? (double)query[entry * BITS + b] : -(double)query[entry * BITS + b];
            table[entry * LANES + bits] = (int16_t)lrint(sum * scale);
        }
    return scale > 0 ? (float)(1 / scale) : 0;
}

/* keys [blocks, keys, dim] to words [blocks, tiles, ceil(dim / 15), 32]; no size is 0.
 * Returns 0, or 1 where a number is neither +1 nor -1. */
int memstore_pack_signs(const float *keys, int16_t *words, long blocks, long count, long dim) {
    long tiles = (count + LANES - 1) / LANES, numbers = (dim + PER_WORD * BITS - 1) / (PER_WORD * BITS);
    const __m512 one = _mm512_set1_ps(1), less = _mm512_set1_ps(-1);
    __mmask16 good = 0xFFFF;
    for (long block = 0; block < blocks; block++)
        for (long place = 0; place < tiles * LANES; place++) {
            const float *key = keys + (block * count + (place < count ? place : count - 1)) * dim;
            int16_t *into = words + (block * tiles + place / LANES) * numbers * LANES + place % LANES;
            for (long word = 0; word < numbers; word++) {
                long left = dim - word * PER_WORD * BITS;
                __mmask16 there = left >= PER_WORD * BITS ? 0x7FFF : (__mmask16)((1u << left) - 1);
                __m512 values = _mm512_mask_loadu_ps(one, there, key + word * PER_WORD * BITS);
                __mmask16 up = _mm512_cmpeq_ps_mask(values, one);
                good &= up | _mm512_cmpeq_ps_mask(values, less);
                into[word * LANES] = (int16_t)(up & there);
            }
        }
    return good != 0xFFFF;
}

/* words [blocks, tiles, ceil(dim / 15), 32], queries [rows, dim], out [blocks, rows]; no size is 0.
 * Returns 0, or -1 where there was no memory for the tables. */
int memstore_best_signs(
    const int16_t *words, const float *queries, float *out, long blocks, long tiles, long dim, long rows,
    long threads) {
    long entries = (dim + BITS - 1) / BITS;
    int16_t *tables = aligned_alloc(64, (size_t)(rows * entries * LANES) * sizeof *tables);
    float *steps = malloc((size_t)rows * sizeof *steps);
    if (!tables || !steps) {
        free(tables);
        free(steps);
        return -1;
    }
    for (long row = 0; row < rows; row++)
        steps[row] = make_table(queries + row * dim, dim, entries, tables + row * entries * LANES);
    Work work = {words, tables, steps, out, blocks, tiles, entries, rows};
#pragma omp parallel for num_threads((int)threads)
    for (long share = 0; share < threads; share++)
        run_share(&work, blocks * share / threads, blocks * (share + 1) / threads);
    free(tables);
    free(steps);
    return 0;
}
