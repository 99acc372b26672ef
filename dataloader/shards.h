// shards.h - files of token ids. 256 int32 header, then the tokens, and nothing after them:
//     {20240520, 1, count}: uint16 tokens, llm.c's shards; {20240801, 7, count}: uint32 tokens, for vocabularies above 65536.
// The count is an int32, so a shard holds at most 2^31 - 1 tokens; data sets are many shards. What we write has a checksum file
// beside it (sidecar.h).
#pragma once
#include "sidecar.h"
#include "utf8.h"

#define SHARD_MAGIC_16 20240520
#define SHARD_MAGIC_32 20240801
#define SHARD_HEADER_BYTES 1024
#define SHARD_MAX_TOKENS ((uint64_t)INT32_MAX)
#define SHARD_TOKENS_DEFAULT ((uint64_t)100000000)

typedef struct {
    FileReader file;
    uint64_t tokens;
    size_t token_bytes; // 2 or 4
} Shard;

void shard_close(Shard* shard) { file_close(&shard->file); }

static bool shard_check(Shard* shard, Error* error) {
    int32_t header[3];
    const char* path = shard->file.path;
    if (shard->file.size < SHARD_HEADER_BYTES) {
        return fail(error, "%s has %" PRIu64 " bytes, a token file has a header of 1024: copy it or make it again", path, shard->file.size);
    }
    if (!file_read(&shard->file, header, sizeof(header), 0, error)) { return false; }
    shard->token_bytes = header[0] == SHARD_MAGIC_16 ? 2 : 4;
    if (header[0] != SHARD_MAGIC_16 && header[0] != SHARD_MAGIC_32) {
        return fail(error, "%s is not a token file: it starts with %" PRId32 ", expected %d or %d", path, header[0], SHARD_MAGIC_16,
                    SHARD_MAGIC_32);
    }
    int32_t version = shard->token_bytes == 2 ? 1 : 7;
    if (header[1] != version) { return fail(error, "%s: version %" PRId32 ", expected %" PRId32, path, header[1], version); }
    if (header[2] < 0) { return fail(error, "%s: header says %" PRId32 " tokens: copy it or make it again", path, header[2]); }
    shard->tokens = (uint64_t)header[2];
    uint64_t expected = SHARD_HEADER_BYTES + shard->tokens * shard->token_bytes;
    if (shard->file.size != expected) {
        return fail(error, "%s: %" PRIu64 " tokens need %" PRIu64 " bytes, the file has %" PRIu64 ": copy it or make it again", path,
                    shard->tokens, expected, shard->file.size);
    }
    return sidecar_check(&shard->file, false, error);
}

bool shard_open(Shard* shard, const char* path, Error* error) {
    memset(shard, 0, sizeof(*shard));
    if (!file_open(&shard->file, path, error)) { return false; }
    if (shard_check(shard, error)) { return true; }
    shard_close(shard);
    return false;
}

// Compares the contents with the checksum file, if there is one.
bool shard_verify(const Shard* shard, Error* error) { return sidecar_check(&shard->file, true, error); }

// tokens: (count), from token `first` on. Ids at or above vocab_size are refused. Any thread may call this.
bool shard_read(const Shard* shard, uint64_t first, size_t count, int32_t* tokens, uint64_t vocab_size, Error* error) {
    if (first > shard->tokens || count > shard->tokens - first) {
        return fail(error, "%s has %" PRIu64 " tokens, %zu were asked for from %" PRIu64, shard->file.path, shard->tokens, count, first);
    }
    // short tokens are read into the back half of the array and widened in place, front to back
    uint8_t* raw = (uint8_t*)tokens + count * (sizeof(int32_t) - shard->token_bytes);
    uint64_t offset = SHARD_HEADER_BYTES + first * shard->token_bytes;
    if (!file_read(&shard->file, raw, count * shard->token_bytes, offset, error)) { return false; }
    for (size_t i = 0; i < count; i++) {
        uint32_t id = 0;
        if (shard->token_bytes == 2) {
            uint16_t narrow;
            memcpy(&narrow, raw + 2 * i, 2);
            id = narrow;
        } else {
            memcpy(&id, raw + 4 * i, 4);
        }
        if (id >= vocab_size || id > INT32_MAX) {
            return fail(error,
                        "%s: token %" PRIu64 " is %" PRIu32 ", but the vocabulary has %" PRIu64 ": was it made with another tokenizer?",
                        shard->file.path, first + i, id, vocab_size);
        }
        tokens[i] = (int32_t)id;
    }
    return true;
}

// tokens: count values of token_bytes (2 or 4) bytes each
bool shard_write(const char* path, const void* tokens, uint64_t count, size_t token_bytes, Error* error) {
    FileWriter file;
    if (count > SHARD_MAX_TOKENS) { return fail(error, "%s: %" PRIu64 " tokens do not fit one shard (at most 2^31 - 1)", path, count); }
    int32_t header[256] = {token_bytes == 2 ? SHARD_MAGIC_16 : SHARD_MAGIC_32, token_bytes == 2 ? 1 : 7, (int32_t)count};
    return file_create(&file, path, error) && file_write(&file, header, sizeof(header), error) &&
           file_write(&file, tokens, (size_t)count * token_bytes, error) && file_commit_checked(&file, error);
}

// Writes PREFIX_SPLIT_000000.bin, ..._000001.bin and so on. The shard under way is held in memory.
typedef struct {
    char stem[PATH_MAX]; // PREFIX_SPLIT
    size_t token_bytes;
    uint64_t shard_tokens, total;
    uint32_t shards; // written so far
    ByteBuffer tokens;
} ShardWriter;

bool shard_writer_open(ShardWriter* writer, const char* prefix, const char* split, size_t vocab_size, uint64_t shard_tokens, Error* error) {
    memset(writer, 0, sizeof(*writer));
    if (shard_tokens == 0 || shard_tokens > SHARD_MAX_TOKENS) {
        return fail(error, "shards of %" PRIu64 " tokens: expected 1 to 2^31 - 1", shard_tokens);
    }
    writer->shard_tokens = shard_tokens;
    writer->token_bytes = vocab_size <= 65536 ? 2 : 4;
    return snprintf(writer->stem, PATH_MAX - 32, "%s_%s", prefix, split) < PATH_MAX - 32 ||
           fail(error, "the path is too long: %.200s...", prefix);
}

static bool shard_writer_path(const ShardWriter* writer, uint32_t shard, char path[PATH_MAX], Error* error) {
    return snprintf(path, PATH_MAX, "%s_%06" PRIu32 ".bin", writer->stem, shard) < PATH_MAX ||
           fail(error, "the path is too long: %.200s...", writer->stem);
}

static bool shard_writer_flush(ShardWriter* writer, Error* error) {
    char path[PATH_MAX];
    uint64_t count = writer->tokens.count / writer->token_bytes;
    writer->tokens.count = 0;
    return shard_writer_path(writer, writer->shards++, path, error) &&
           shard_write(path, writer->tokens.data, count, writer->token_bytes, error);
}

bool shard_writer_append(ShardWriter* writer, const uint32_t* ids, size_t count, Error* error) {
    writer->total += count;
    while (count > 0) {
        size_t room = (size_t)writer->shard_tokens - writer->tokens.count / writer->token_bytes, n = min_size(count, room);
        bytes_reserve(&writer->tokens, n * writer->token_bytes);
        uint8_t* at = writer->tokens.data + writer->tokens.count;
        for (size_t i = 0; i < n; i++) { memcpy(at + i * writer->token_bytes, &ids[i], writer->token_bytes); } // little endian
        writer->tokens.count += n * writer->token_bytes;
        if (n == room && !shard_writer_flush(writer, error)) { return false; }
        ids += n;
        count -= n;
    }
    return true;
}

void shard_writer_free(ShardWriter* writer) { bytes_free(&writer->tokens); }

// Writes what is left. Shards of an earlier, longer run under the same name would be read as part of this one: they go.
bool shard_writer_close(ShardWriter* writer, Error* error) {
    bool good = writer->tokens.count == 0 || shard_writer_flush(writer, error);
    for (uint32_t shard = writer->shards; good; shard++) {
        char path[PATH_MAX], sidecar[PATH_MAX];
        good = shard_writer_path(writer, shard, path, error) && sidecar_name(sidecar, path, error);
        if (!good || access(path, F_OK) != 0) { break; }
        if (unlink(path) != 0) { good = fail(error, "cannot remove %s of an earlier run: %s", path, strerror(errno)); }
        unlink(sidecar);
        fprintf(stderr, "notice: removed %s, left by an earlier run\n", path);
    }
    shard_writer_free(writer);
    return good;
}
