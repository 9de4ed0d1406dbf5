/* Scores of index keys in 8 bits, and the keys whose exact scores are needed: what benchmarks/int8_keys says.
 *
 * Keys are packed as [16 keys at a time][four numbers at a time][key][number], raised by 128, because the instructions
 * want one side without a sign. Lanes are keys, and four numbers of a query are broadcast against them. With AVX2 the
 * sum of two products must fit into 16 bits, so queries have 7 bits.
 */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define GROUP 16
#define HEADS 4
#ifdef __AVX512VNNI__
#define KEYS 4
#define LANES 16
typedef __m512i Whole;
typedef __m512 Vector;
#define LOAD _mm512_loadu_si512
#define SPREAD _mm512_set1_epi32
#define ADD_PRODUCTS _mm512_dpbusd_epi32
#define RECTIFIED(sum) _mm512_cvtepi32_ps(_mm512_max_epi32(sum, _mm512_setzero_si512()))
#else
#define KEYS 2
#define LANES 8
typedef __m256i Whole;
typedef __m256 Vector;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(const void *)(from))
#define SPREAD _mm256_set1_epi32
#define ADD_PRODUCTS(sum, keys, query) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(keys, query), _mm256_set1_epi16(1)))
#define RECTIFIED(sum) _mm256_cvtepi32_ps(_mm256_max_epi32(sum, _mm256_setzero_si256()))
#endif

/* codes [groups, dim / 4, 16, 4], scales [groups * 16], queries [rows, heads, dim], start and weights [rows, heads],
 * scores [rows, groups * 16]. Heads are a multiple of HEADS, groups of 4, dim of 4. */
void memstore_int8_scores(const uint8_t *codes, const float *scales, const int8_t *queries, const int32_t *start,
                          const float *weights, float *scores, int64_t groups, int64_t dim, int64_t rows, int64_t heads) {
    int64_t count = groups * GROUP;
    for (int64_t key = 0; key < count; key += KEYS * LANES)
        for (int64_t row = 0; row < rows; row++) {
            Vector sums[KEYS] = {{0}};
            for (int64_t head = row * heads; head < (row + 1) * heads; head += HEADS) {
                Whole products[HEADS][KEYS];
                const uint8_t *from[KEYS];
                for (int v = 0; v < KEYS; v++) {
                    int64_t at = key + v * LANES;
                    from[v] = codes + (at / GROUP * dim / 4 * GROUP + at % GROUP) * 4;
                    for (int h = 0; h < HEADS; h++) products[h][v] = SPREAD(start[head + h]);
                }
                for (int64_t d = 0; d < dim; d += 4) {
                    Whole keys[KEYS];
                    for (int v = 0; v < KEYS; v++) keys[v] = LOAD(from[v] + d * GROUP);
                    for (int h = 0; h < HEADS; h++) {
                        int32_t query;
                        memcpy(&query, queries + (head + h) * dim + d, sizeof query);
                        for (int v = 0; v < KEYS; v++) products[h][v] = ADD_PRODUCTS(products[h][v], keys[v], SPREAD(query));
                    }
                }
                for (int h = 0; h < HEADS; h++)
                    for (int v = 0; v < KEYS; v++) sums[v] += RECTIFIED(products[h][v]) * weights[head + h];
            }
            for (int v = 0; v < KEYS; v++) {
                Vector scale;
                memcpy(&scale, scales + key + v * LANES, sizeof scale);
                sums[v] *= scale;
                memcpy(scores + row * count + key + v * LANES, &sums[v], sizeof scale);
            }
        }
}

static uint32_t ordered(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The positions of the keys that may be among the `k` best, ascending. The score of key t is at most `key_error` *
 * errors[t] + `query_error` * norms[t] away from scores[t]. The k-th largest lower bound is rounded down to the upper 16
 * bits of a float: at least k keys reach it. `bins` has room for 65,536 counts, all zero. */
int64_t memstore_int8_look(const float *scores, const float *errors, const float *norms, int64_t count, int64_t k,
                           int64_t *ids, uint32_t *bins, const float *factors) {
    float key_error = factors[0], query_error = factors[1];
    int64_t found = 0, bin = 65535, above = 0;
    for (int64_t t = 0; t < count; t++)
        bins[ordered(scores[t] - (key_error * errors[t] + query_error * norms[t])) >> 16]++;
    while (bin > 0 && (above += bins[bin]) < k) bin--;
    uint32_t least = (uint32_t)bin << 16;
    for (int64_t t = 0; t < count; t++) {
        ids[found] = t;
        found += ordered(scores[t] + (key_error * errors[t] + query_error * norms[t])) >= least;
    }
    return found;
}
