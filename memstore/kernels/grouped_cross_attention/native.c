/* One token over a prepared list of blocks, with the projections around it: what native.py says, in float32.
 *
 * Of a small model every operation of a library costs more than the numbers it computes, so all of them are one here.
 * Loops run over what lies side by side in memory, so that compilers make vectors of them.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    const float *norm;   /* [hidden] */
    const float *query;  /* [groups * heads * dim, hidden] */
    const float *keys;   /* [rows, groups, dim, joined], scaled */
    const float *values; /* [rows, groups, joined, wide], weighed */
    const float *out;    /* [hidden, groups * heads * wide] */
    int64_t rows, hidden, groups, heads, dim, wide, joined, size;
    float eps;
} List;

static float product(const float *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* to [n] += factor * from [n] */
static void add(float *to, const float *from, float factor, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] += factor * from[i];
}

/* Softmax over each block of `size` scores. */
static void softmax(float *scores, int64_t joined, int64_t size) {
    for (int64_t first = 0; first < joined; first += size) {
        float *block = scores + first, most = block[0], sum = 0;
        for (int64_t i = 1; i < size; i++) most = block[i] > most ? block[i] : most;
        for (int64_t i = 0; i < size; i++) sum += block[i] = expf(block[i] - most);
        for (int64_t i = 0; i < size; i++) block[i] /= sum;
    }
}

/* result [rows, hidden] = x [rows, hidden] plus what each row finds in its list. Returns 0, or -1 without memory.
 * What it computes with is its own, so that several threads may use one list. */
int memstore_attend_token(const List *list, const float *x, float *result) {
    int64_t inner = list->groups * list->heads * list->dim, found = list->groups * list->heads * list->wide;
    float *normed = malloc((size_t)(list->hidden + inner + found + list->joined) * sizeof *normed);
    if (!normed) return -1;
    float *query = normed + list->hidden, *attended = query + inner, *scores = attended + found;
    for (int64_t row = 0; row < list->rows; row++, x += list->hidden, result += list->hidden) {
        float mean = product(x, x, list->hidden) / (float)list->hidden, factor = 1 / sqrtf(mean + list->eps);
        for (int64_t i = 0; i < list->hidden; i++) normed[i] = x[i] * factor * list->norm[i];
        for (int64_t i = 0; i < inner; i++) query[i] = product(list->query + i * list->hidden, normed, list->hidden);
        for (int64_t i = 0; i < found; i++) attended[i] = 0;
        for (int64_t head = 0; head < list->groups * list->heads; head++) {
            int64_t group = row * list->groups + head / list->heads;
            const float *keys = list->keys + group * list->dim * list->joined;
            const float *values = list->values + group * list->joined * list->wide;
            for (int64_t j = 0; j < list->joined; j++) scores[j] = 0;
            for (int64_t d = 0; d < list->dim; d++)
                add(scores, keys + d * list->joined, query[head * list->dim + d], list->joined);
            softmax(scores, list->joined, list->size);
            for (int64_t j = 0; j < list->joined; j++)
                add(attended + head * list->wide, values + j * list->wide, scores[j], list->wide);
        }
        for (int64_t i = 0; i < list->hidden; i++) result[i] = x[i] + product(list->out + i * found, attended, found);
    }
    free(normed);
    return 0;
}
