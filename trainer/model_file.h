// model_file.h - llm.c's model file (.bin, magic 20240326): a header of 256 int32, then 16 tensors without gaps, little-endian.
//     h[0] magic   h[1] version: 3 = all fp32, 5 = all bf16   h[2] max_seq_len   h[3] vocab_size V   h[4] layers L   h[5] heads
//     h[6] channels C   h[7] padded_vocab Vp, V rounded up to a multiple of 128   h[8..255] zero
//     wte (Vp,C) wpe (maxT,C) ln1w (L,C) ln1b (L,C) qkvw (L,3C,C) qkvb (L,3C) attprojw (L,C,C) attprojb (L,C) ln2w (L,C) ln2b (L,C)
//     fcw (L,4C,C) fcb (L,4C) fcprojw (L,C,4C) fcprojb (L,C) lnfw (C) lnfb (C); the output head is wte. Rows V..Vp-1 of wte are zero.
// The file's order is the order of the parameter block in memory. Either version is read into fp32 or bf16 memory and written from
// either, in pieces: the model is never held twice. The size is checked to the byte before anything is allocated. Pieces are written in
// any order, and by several ranks at once (file_part.h).
#pragma once
#include "../dataloader/file.h"
#include "../kernels/floatx.cuh"
#include "file_part.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "files are little-endian and are read as they lie: this machine needs byte swaps that are not written"
#endif

#define MODEL_FILE_MAGIC 20240326
#define MODEL_FILE_HEADER_BYTES 1024

// Element types are named by the file version that holds them.
#define MODEL_FP32 3
#define MODEL_BF16 5
#ifdef FLOATX_BF16
#define MODEL_FLOATX MODEL_BF16
#else
#define MODEL_FLOATX MODEL_FP32
#endif

typedef struct {
    int max_seq_len, vocab_size, layers, heads, channels, padded_vocab;
} ModelHeader;

typedef struct {
    FileReader file;
    ModelHeader header;
    int version;
    uint64_t padding_fixed; // values in padding rows that were not zero and were given out as zero
    uint64_t not_finite;    // values read so far that are infinite or NaN
} ModelReader;

typedef struct {
    FilePart part;
    ModelHeader header;
    int version;
    PartSum sum; // elements written, and their share in the checksum of the file
} ModelWriter;

static size_t model_element_bytes(int version) {
    return version == MODEL_FP32 ? 4 : 2;
}

// Parameters of the model, padding included. The header must have passed model_header_check.
uint64_t model_header_elements(const ModelHeader* h) {
    uint64_t C = (uint64_t)h->channels, L = (uint64_t)h->layers;
    uint64_t rows = (uint64_t)h->padded_vocab + (uint64_t)h->max_seq_len;
    return rows * C + L * (12 * C * C + 13 * C) + 2 * C;
}

uint64_t model_file_bytes(const ModelHeader* h, int version) {
    return MODEL_FILE_HEADER_BYTES + model_header_elements(h) * model_element_bytes(version);
}

// Are these sizes those of a model? `path` opens the message.
bool model_header_check(const ModelHeader* h, const char* path, Error* error) {
    if (h->max_seq_len < 1 || h->vocab_size < 1 || h->layers < 1 || h->heads < 1 || h->channels < 1) {
        return fail(error,
                    "%s: the model header is damaged: expected sizes above zero, found max_seq_len %d, vocab_size %d, layers %d, heads %d, "
                    "channels %d; fetch or write the file again",
                    path, h->max_seq_len, h->vocab_size, h->layers, h->heads, h->channels);
    }
    if (h->channels % h->heads != 0) {
        return fail(error, "%s: expected heads to divide channels, found %d heads and %d channels; the header is damaged", path, h->heads,
                    h->channels);
    }
    if (h->padded_vocab < h->vocab_size || h->padded_vocab % 128 != 0) {
        return fail(error, "%s: expected a padded vocabulary that is a multiple of 128 and at least %d, found %d; the header is damaged",
                    path, h->vocab_size, h->padded_vocab);
    }
    double C = h->channels, L = h->layers, rows = (double)h->padded_vocab + h->max_seq_len;
    double elements = rows * C + L * (12 * C * C + 13 * C) + 2 * C;
    if (elements > 0x1p60) { // so that no count or size below can overflow
        return fail(error, "%s: %d layers of %d channels would be %.3g parameters; the header is damaged", path, h->layers, h->channels,
                    elements);
    }
    return true;
}

// What a file that is not the expected one looks like, from its first bytes: the end of an error line.
static const char* model_file_hint(const uint8_t* start, size_t bytes) {
    static const struct {
        uint32_t magic;
        const char* text;
    } known[] = {
        {20240326, "this is a model file"},
        {20240327, "this is a debug state, not a model"},
        {20240520, "this is a token shard; give it to --train-data or --val-data"},
        {20240801, "this is a token shard of a 32-bit vocabulary; give it to --train-data or --val-data"},
        {20240328, "this is a tokenizer"},
        {20240522, "this is a HellaSwag set"},
        {20240527, "this is an optimizer state of llm.c; give the model file beside it"},
        {20240803, "this is a Llama model, which is not supported"},
    };
    uint32_t magic = 0, later = 0;
    if (bytes >= 4) { memcpy(&magic, start, 4); }
    for (size_t i = 4; i < bytes; i++) { later |= start[i]; }
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        if (magic == known[i].magic) { return known[i].text; }
        if (magic == __builtin_bswap32(known[i].magic)) {
            return "it was written with the other byte order; write it again on this machine";
        }
    }
    if (bytes > 0 && start[0] == '<') { return "it looks like a web page: the download failed; fetch it again"; }
    if (bytes >= 4 && memcmp(start, "\177ELF", 4) == 0) { return "it is a program"; }
    if (bytes >= 9 && start[8] == '{') { return "it looks like a safetensors file"; }
    if (bytes >= 4 && magic == 0 && later == 0) { return "it holds zeros: a copy or download broke off; fetch it again"; }
    return "is it the right file?";
}

// Opens, and checks everything that can be known without reading the tensors.
bool model_reader_open(ModelReader* reader, const char* path, Error* error) {
    int32_t h[MODEL_FILE_HEADER_BYTES / 4] = {0};
    memset(reader, 0, sizeof(*reader));
    if (!file_open(&reader->file, path, error)) { return false; }
    uint64_t size = reader->file.size;
    size_t present = (size_t)(size < sizeof(h) ? size : sizeof(h));
    bool good = file_read(&reader->file, h, present, 0, error);
    if (good && (present < 4 || h[0] != MODEL_FILE_MAGIC)) {
        good = present == 0 ? fail(error, "%s is empty; expected a model file; fetch or write it again", path)
                            : fail(error, "%s is not a model file: expected magic %d, found %" PRId32 "; %s", path, MODEL_FILE_MAGIC, h[0],
                                   model_file_hint((const uint8_t*)h, present));
    }
    if (good && present < sizeof(h)) {
        good = fail(error, "%s is cut off: expected a header of %zu bytes, found %zu; fetch or write it again", path, sizeof(h), present);
    }
    if (good && h[1] != MODEL_FP32 && h[1] != MODEL_BF16) {
        good = fail(error, "%s: expected model file version 3 (fp32) or 5 (bf16), found %" PRId32 "; export it again in one of these", path,
                    h[1]);
    }
    if (good) {
        ModelHeader header = {h[2], h[3], h[4], h[5], h[6], h[7]};
        reader->header = header;
        reader->version = h[1];
        good = model_header_check(&header, path, error);
    }
    if (good && size != model_file_bytes(&reader->header, reader->version)) {
        uint64_t expected = model_file_bytes(&reader->header, reader->version);
        good = fail(error,
                    "%s is %s: expected %" PRIu64 " bytes for %d layers of %d channels in %s, found %" PRIu64 "; fetch or write it again",
                    path, size < expected ? "cut off" : "too long", expected, reader->header.layers, reader->header.channels,
                    reader->version == MODEL_FP32 ? "fp32" : "bf16", size);
    }
    if (!good) { file_close(&reader->file); }
    return good;
}

void model_reader_close(ModelReader* reader) {
    file_close(&reader->file);
}

// Padding rows become zero, values that are not numbers are counted. out: elements first..first+count-1 of the model.
static void model_reader_inspect(ModelReader* reader, uint64_t first, size_t count, void* out, int type) {
    uint64_t C = (uint64_t)reader->header.channels;
    uint64_t from = (uint64_t)reader->header.vocab_size * C, to = (uint64_t)reader->header.padded_vocab * C;
    size_t bytes = model_element_bytes(type);
    for (uint64_t i = from > first ? from : first; i < to && i < first + count; i++) {
        char* at = (char*)out + (i - first) * bytes;
        uint32_t bits = 0;
        memcpy(&bits, at, bytes);
        if (bits != 0) { reader->padding_fixed++; }
        memset(at, 0, bytes);
    }
    uint64_t bad = 0;
    if (type == MODEL_FP32) {
        const uint32_t* x = (const uint32_t*)out; // only bits are looked at
        for (size_t i = 0; i < count; i++) { bad += (x[i] & 0x7f800000u) == 0x7f800000u; }
    } else {
        const uint16_t* x = (const uint16_t*)out;
        for (size_t i = 0; i < count; i++) { bad += (x[i] & 0x7f80u) == 0x7f80u; }
    }
    reader->not_finite += bad;
}

// out: elements first..first+count-1 in file order, as `type`, on the host.
bool model_reader_read(ModelReader* reader, uint64_t first, size_t count, void* out, int type, Error* error) {
    uint64_t elements = model_header_elements(&reader->header);
    size_t bytes = model_element_bytes(reader->version);
    if (first > elements || count > elements - first) {
        return fail(error, "%s has %" PRIu64 " parameters; %zu from %" PRIu64 " were asked for", reader->file.path, elements, count, first);
    }
    if (type == reader->version) {
        if (!file_read(&reader->file, out, count * bytes, MODEL_FILE_HEADER_BYTES + first * bytes, error)) { return false; }
        model_reader_inspect(reader, first, count, out, type);
        return true;
    }
    union {
        float wide[8192];
        uint16_t half[8192];
    } piece;
    for (size_t done = 0; done < count;) {
        size_t n = min_size(count - done, COUNT_OF(piece.wide));
        if (!file_read(&reader->file, &piece, n * bytes, MODEL_FILE_HEADER_BYTES + (first + done) * bytes, error)) { return false; }
        if (type == MODEL_FP32) {
            float* to = (float*)out + done;
            for (size_t i = 0; i < n; i++) { to[i] = bf16_to_float(piece.half[i]); }
        } else {
            uint16_t* to = (uint16_t*)out + done;
            for (size_t i = 0; i < n; i++) { to[i] = float_to_bf16(piece.wide[i]); }
        }
        done += n;
    }
    model_reader_inspect(reader, first, count, out, type);
    return true;
}

// What the user should hear of a file that could be read; empty when all is well.
void model_reader_notice(const ModelReader* reader, Error* notice) {
    notice->text[0] = 0;
    if (reader->padding_fixed > 0) {
        fail(notice, "%s: expected zeros in the padding rows of wte, found %" PRIu64 " other values; they are taken as zero",
             reader->file.path, reader->padding_fixed);
    } else if (reader->not_finite > 0) {
        fail(notice, "%s: %" PRIu64 " weights are infinite or NaN: the run that wrote it had diverged, or the file is damaged",
             reader->file.path, reader->not_finite);
    }
}

bool model_file_read_header(const char* path, ModelHeader* header, int* version, Error* error) {
    ModelReader reader;
    if (!model_reader_open(&reader, path, error)) { return false; }
    *header = reader.header;
    *version = reader.version;
    model_reader_close(&reader);
    return true;
}

// The whole model. expected: what `out` was sized for; out: model_header_elements(expected) values of `type`, on the host.
bool model_file_read(const char* path, const ModelHeader* expected, void* out, int type, Error* notice, Error* error) {
    ModelReader reader;
    if (!model_reader_open(&reader, path, error)) { return false; }
    const ModelHeader* h = &reader.header;
    bool good = memcmp(h, expected, sizeof(*h)) == 0; // six ints, no gaps
    if (!good) {
        fail(error,
             "%s holds another model: expected layers %d, heads %d, channels %d, vocabulary %d (%d), max_seq_len %d; "
             "found %d, %d, %d, %d (%d), %d",
             path, expected->layers, expected->heads, expected->channels, expected->vocab_size, expected->padded_vocab,
             expected->max_seq_len, h->layers, h->heads, h->channels, h->vocab_size, h->padded_vocab, h->max_seq_len);
    }
    good = good && model_reader_read(&reader, 0, (size_t)model_header_elements(h), out, type, error);
    if (good && notice) { model_reader_notice(&reader, notice); }
    model_reader_close(&reader);
    return good;
}

static bool model_writer_init(ModelWriter* writer, const char* path, const ModelHeader* header, int version, Error* error) {
    file_part_init(&writer->part);
    writer->header = *header;
    writer->version = version;
    writer->sum.written = writer->sum.crc = 0;
    if (version != MODEL_FP32 && version != MODEL_BF16) { return fail(error, "%s: there is no model file version %d", path, version); }
    return model_header_check(header, path, error);
}

bool model_writer_create(ModelWriter* writer, const char* path, const ModelHeader* header, int version, Error* error) {
    return model_writer_init(writer, path, header, version, error) &&
           file_part_create(&writer->part, path, model_file_bytes(header, version), error);
}

// The file that process `maker` created at `path`.
bool model_writer_join(ModelWriter* writer, const char* path, const ModelHeader* header, int version, long maker, Error* error) {
    return model_writer_init(writer, path, header, version, error) &&
           file_part_join(&writer->part, path, model_file_bytes(header, version), maker, error);
}

void model_writer_abandon(ModelWriter* writer) {
    file_part_abandon(&writer->part);
}

// One piece, of the file's type.
static bool model_writer_put_piece(ModelWriter* writer, uint64_t first, const void* elements, size_t count, Error* error) {
    uint64_t unit = model_element_bytes(writer->version), after = model_header_elements(&writer->header) - first - count;
    size_t bytes = count * (size_t)unit;
    if (!file_part_write(&writer->part, elements, bytes, MODEL_FILE_HEADER_BYTES + first * unit, error)) { return false; }
    writer->sum.crc ^= crc32c_share(crc32c(0, elements, bytes), after * unit);
    writer->sum.written += count;
    return true;
}

// Elements first..first+count-1 in file order, of `type`, on the host; each once. On failure the file is abandoned.
bool model_writer_put(ModelWriter* writer, uint64_t first, const void* elements, int type, size_t count, Error* error) {
    uint64_t all = model_header_elements(&writer->header);
    if (first > all || count > all - first) {
        model_writer_abandon(writer);
        return fail(error, "%s has %" PRIu64 " parameters; %zu from %" PRIu64 " were given", writer->part.file.path, all, count, first);
    }
    if (type == writer->version) { return model_writer_put_piece(writer, first, elements, count, error); }
    union {
        float wide[8192];
        uint16_t half[8192];
    } piece;
    for (size_t done = 0; done < count;) {
        size_t n = min_size(count - done, COUNT_OF(piece.wide));
        if (type == MODEL_FP32) {
            const float* from = (const float*)elements + done;
            for (size_t i = 0; i < n; i++) { piece.half[i] = float_to_bf16(from[i]); }
        } else {
            const uint16_t* from = (const uint16_t*)elements + done;
            for (size_t i = 0; i < n; i++) { piece.wide[i] = bf16_to_float(from[i]); }
        }
        if (!model_writer_put_piece(writer, first + done, &piece, n, error)) { return false; }
        done += n;
    }
    return true;
}

bool model_writer_sync(ModelWriter* writer, Error* error) {
    return file_part_sync(&writer->part, error);
}

// What another rank put into the same file.
void model_writer_add(ModelWriter* writer, PartSum sum) {
    writer->sum.written += sum.written;
    writer->sum.crc ^= sum.crc;
}

// Afterwards writer->part.file.size and .crc describe the file (checkpoint_record takes them).
bool model_writer_commit(ModelWriter* writer, Error* error) {
    const ModelHeader* m = &writer->header;
    int32_t h[MODEL_FILE_HEADER_BYTES / 4] = {MODEL_FILE_MAGIC, writer->version, m->max_seq_len, m->vocab_size,
                                              m->layers,        m->heads,        m->channels,    m->padded_vocab};
    uint64_t expected = model_header_elements(m);
    FileWriter* file = &writer->part.file;
    if (writer->sum.written != expected) {
        model_writer_abandon(writer);
        return fail(error, "%s: %" PRIu64 " parameters were given for a model of %" PRIu64, file->path, writer->sum.written, expected);
    }
    file->size = model_file_bytes(m, writer->version);
    file->crc = crc32c_share(crc32c(0, h, sizeof(h)), file->size - sizeof(h)) ^ (uint32_t)writer->sum.crc;
    return file_part_write(&writer->part, h, sizeof(h), 0, error) && file_commit(file, error);
}

// The whole model from host memory of `type`; record (may be NULL) receives size and CRC for checkpoint_record.
bool model_file_write(const char* path, const ModelHeader* header, int version, const void* elements, int type, FileWriter* record,
                      Error* error) {
    ModelWriter writer;
    bool good = model_writer_create(&writer, path, header, version, error) &&
                model_writer_put(&writer, 0, elements, type, (size_t)model_header_elements(header), error) &&
                model_writer_commit(&writer, error);
    if (good && record) { *record = writer.part.file; }
    return good;
}
