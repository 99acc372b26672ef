// bench_tokenizer.c - speed of the encoder alone, on one thread: TOKENIZER TEXT [IDS]. Prints the best of five passes, each with an
// empty cache, and writes the ids as uint32 to IDS. bench_tokenizer.py builds it, runs it, and puts tiktoken beside it.
#include "../dataloader/bpe_encode.h"

int main(int argc, char** argv) {
    Error error;
    Tokenizer tokenizer;
    Encoder encoder;
    FileReader file;
    TokenBuffer tokens = {NULL, 0, 0};
    if (argc < 3) {
        fprintf(stderr, "usage: %s TOKENIZER TEXT [IDS]\n", argv[0]);
        return 1;
    }
    double start = seconds_now();
    if (!tokenizer_open(&tokenizer, argv[1], &error) || !encoder_open(&encoder, &tokenizer, &error) || !file_open(&file, argv[2], &error)) {
        fprintf(stderr, "error: %s\n", error.text);
        return 1;
    }
    double opened = seconds_now() - start, best = INFINITY;
    uint8_t* text = (uint8_t*)need(malloc((size_t)file.size + 1));
    if (!file_read(&file, text, (size_t)file.size, 0, &error)) {
        fprintf(stderr, "error: %s\n", error.text);
        return 1;
    }
    for (int pass = 0; pass < 5; pass++) {
        EncodeWork work;
        encode_work_new(&work);
        tokens.count = 0;
        start = seconds_now();
        encode_text(&encoder, &work, text, (size_t)file.size, &tokens);
        best = fmin(best, seconds_now() - start);
        encode_work_free(&work);
    }
    FILE* ids = argc > 3 ? fopen(argv[3], "wb") : NULL;
    if (ids) {
        fwrite(tokens.ids, sizeof(uint32_t), tokens.count, ids);
        fclose(ids);
    }
    printf("%.1f MB/s, %zu tokens, opened in %.3f s\n", (double)file.size * 1e-6 / best, tokens.count, opened);
    free(text);
    file_close(&file);
    tokens_free(&tokens);
    encoder_close(&encoder);
    tokenizer_free(&tokenizer);
    return 0;
}
