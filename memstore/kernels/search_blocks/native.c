/* The best blocks for a few queries, in one pass over the keys: what native.py says.
 *
 * With few queries a search is as fast as keys can be read, so each key is read once, widened to float32 where it is
 * bfloat16, and multiplied with all queries; the best blocks of each query are kept in order. A block is as good as its
 * best key; of equal blocks the smaller id comes first. Either all queries look into all parts, or each into its own.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 2048 /* bytes: the processor reads ahead by itself, but not far enough */
#define LINE 64

typedef struct {
    const void *keys;      /* [blocks, size, dim] of one key head, float32 or bfloat16 */
    const int64_t *ids;    /* [blocks], or NULL: 0, 1, ... */
    const uint8_t *wanted; /* [blocks], or NULL: all count */
    int64_t blocks;
} Part;

typedef struct {
    int64_t size, dim, rows, k;
    int64_t half; /* whether keys are bfloat16 */
} Sizes;

typedef struct { /* [rows, k] each, best first; filled with -infinity, -1 and -1 */
    float *scores;
    int64_t *ids;
    int64_t *offsets; /* of the best key in its block */
} Best;

static float product(const float *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static float half_product(const uint16_t *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)a[i] << 16;
        float number;
        memcpy(&number, &bits, sizeof number);
        sum += number * b[i];
    }
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
        float score = sizes->half ? half_product((const uint16_t *)(const void *)key, query, sizes->dim)
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

/* Queries are [rows, dim] float32. */
void memstore_search(const Part *parts, int64_t count, const Sizes *sizes, const float *queries, const Best *best) {
    for (const Part *part = parts; part < parts + count; part++)
        for (int64_t block = 0; block < part->blocks; block++) {
            if (part->wanted && !part->wanted[block]) continue;
            for (int64_t row = 0; row < sizes->rows; row++) {
                int64_t offset;
                float score = best_key(part, sizes, block * sizes->size, queries + row * sizes->dim, &offset);
                insert(best, row * sizes->k, sizes->k, score, part->ids ? part->ids[block] : block, offset);
            }
        }
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
