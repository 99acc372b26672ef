// params.h - the types of the parameter table and of units. One table lists every tensor of the model (GPT's rows are in
// train_gpt.cu); optimizer, checkpoint, log and later sharding and compression all read it, so that nothing is decided by an index.
// A unit is one tensor of one layer, or a block of rows of an embedding: the currency of ownership. Units depend on the model
// alone. Padding rows (vocabulary rounded up for the GEMM) belong to no unit: no norm, state or message ever holds them.
#pragma once
#include "base.h"

typedef enum { ROLE_EMBEDDING, ROLE_MATRIX, ROLE_VECTOR } Role;
typedef enum { INIT_NORMAL, INIT_NORMAL_RESIDUAL, INIT_ONE, INIT_ZERO } Init;

typedef struct {
    const char* name;  // llm.c's name, e.g. "qkvw"
    size_t layers;     // instances: L, or 1 for tensors outside the blocks
    size_t rows, cols; // shape of one instance; a vector has rows = 1
    size_t real_rows;  // rows that the model knows; rows beyond are padding and stay zero
    Role role;
    Init init;
    bool decay;        // weight decay applies
    bool in_layers;    // one instance a layer; else outside the blocks
    int parts;         // equal groups of rows that are matrices of their own: 3 in qkvw, else 1
    size_t offset;     // first element in the parameter block: tensors in file order, each over all layers (filled by params_layout)
} TensorSpec;

typedef struct {
    int tensor;         // index into the table
    int layer;          // 0 for tensors outside the blocks
    size_t row, rows;   // which rows of the instance
    size_t cols;
    size_t offset;      // first element in the parameter and the gradient block
    size_t count;       // rows * cols
    size_t packed;      // first element when only units are stored, without padding: place of optimizer state and masters
} Unit;

#define PARAMS_MAX_TENSORS 32

typedef struct {
    TensorSpec tensors[PARAMS_MAX_TENSORS];
    int tensor_count;
    size_t elements;  // of the parameter block, padding included
    Unit* units;      // in table order
    size_t unit_count;
    size_t packed;    // elements without padding
} ParamTable;

// Fills offsets and the list of units; embeddings are cut into blocks of embedding_rows rows. Frees with params_free.
static inline void params_layout(ParamTable* table, size_t embedding_rows) {
    size_t offset = 0, unit_count = 0, packed = 0;
    for (int i = 0; i < table->tensor_count; i++) {
        TensorSpec* s = &table->tensors[i];
        s->offset = offset;
        offset += s->layers * s->rows * s->cols;
        unit_count += s->role == ROLE_EMBEDDING ? ceil_div(s->real_rows, embedding_rows) : s->layers;
    }
    table->elements = offset;
    table->units = (Unit*)need(calloc(unit_count, sizeof(Unit)));
    table->unit_count = 0;
    for (int i = 0; i < table->tensor_count; i++) {
        const TensorSpec* s = &table->tensors[i];
        size_t block = s->role == ROLE_EMBEDDING ? embedding_rows : s->real_rows;
        for (size_t layer = 0; layer < s->layers; layer++) {
            for (size_t row = 0; row < s->real_rows; row += block) {
                Unit* u = &table->units[table->unit_count++];
                u->tensor = i;
                u->layer = (int)layer;
                u->row = row;
                u->rows = min_size(block, s->real_rows - row);
                u->cols = s->cols;
                u->offset = s->offset + (layer * s->rows + row) * s->cols;
                u->count = u->rows * u->cols;
                u->packed = packed;
                packed += u->count;
            }
        }
    }
    table->packed = packed;
}

static inline void params_free(ParamTable* table) {
    free(table->units);
    table->units = NULL;
}

// Where the tensors stand in a block of memory that holds `slots` layers at a time, layer l in slot l % slots. A block of all layers is
// laid out like the model file; smaller ones hold layers on their way.
typedef struct {
    size_t offset[PARAMS_MAX_TENSORS];
    size_t slots, elements;
} BlockLayout;

static inline BlockLayout block_layout(const ParamTable* table, size_t slots) {
    BlockLayout b;
    memset(&b, 0, sizeof(b));
    b.slots = slots;
    for (int i = 0; i < table->tensor_count; i++) {
        const TensorSpec* s = &table->tensors[i];
        b.offset[i] = b.elements;
        b.elements += min_size(s->layers, slots) * s->rows * s->cols;
    }
    return b;
}

// First element of a tensor's instance.
static inline size_t block_at(const BlockLayout* b, const ParamTable* table, int tensor, int layer) {
    const TensorSpec* s = &table->tensors[tensor];
    return b->offset[tensor] + (size_t)layer % b->slots * s->rows * s->cols;
}

static inline size_t block_unit_at(const BlockLayout* b, const ParamTable* table, const Unit* u) {
    return block_at(b, table, u->tensor, u->layer) + u->row * u->cols;
}
