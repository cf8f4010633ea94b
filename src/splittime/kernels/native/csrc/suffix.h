/* Drafts by suffix: where the last tokens of a text have stood before, and what followed them there. */
#ifndef SPLITTIME_SUFFIX_H
#define SPLITTIME_SUFFIX_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* The newest `capacity` tokens of a text that grows; a power of two. Not safe for several threads. */
typedef struct StText StText;

StText *st_text_new(int64_t capacity);
void st_text_free(StText *text);

/* A negative token stands between two texts: nothing matches across it and no draft reaches over it. */
void st_text_append(StText *text, const int32_t *tokens, int64_t count);

/* For each row: appends the next counts[row] of `tokens` to its text, then looks for the longest end of the text that
 * stood before, in the text itself (sources[row] = 0) or in corpora[row] (1; NULL: none), and has something behind it.
 * lengths[row]: how many tokens match, 0 if fewer than two. num_drafts[row], drafts[row][most]: what followed them. Of its
 * own end a text knows what follows by what it has just repeated: drafts of "ab ab a" go on with "b a b". */
void st_text_follow(int32_t rows, StText *const *texts, StText *const *corpora, const int32_t *counts,
                    const int32_t *tokens, int32_t most, int32_t *lengths, int32_t *sources, int32_t *num_drafts,
                    int32_t *drafts);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
