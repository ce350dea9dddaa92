// llama.cpp, as benchmarks/_contestant.py asks it: greedy answers for many requests, continuously batched.
// scripts/peers_env.sh compiles it. The batches are those of llama-server: its defaults are the contexts' here.

#include <algorithm>
#include <vector>

#include "llama.h"

namespace {

struct Slot {
    int request = -1;   // none
    int known = 0;      // tokens that prompt and answer have so far
    int computed = 0;   // of them
    int row = -1;       // in the batch, whose logits choose the next token
};

}  // namespace

extern "C" {

// Write a GGUF file again with weights of another kind: a llama_ftype. Returns 0 if that worked.
int convert(const char * source, const char * target, int kind) {
    auto params = llama_model_quantize_default_params();
    params.ftype = (llama_ftype) kind;
    params.allow_requantize = true;
    return (int) llama_model_quantize(source, target, &params);
}

// An engine on one thread, or null. It lives as long as the process.
llama_context * open_engine(const char * path, int num_seqs, int longest) {
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == nullptr) return nullptr;
    auto params = llama_context_default_params();
    params.n_seq_max = num_seqs;
    params.n_ctx = num_seqs * (uint32_t) longest;
    params.n_threads = params.n_threads_batch = 1;
    return llama_init_from_model(model, params);
}

// Serve requests: their prompts one after the other in `prompts`, their answers likewise in `answers`. Returns 0 if that
// worked.
int serve(llama_context * context, int num_requests, const int * prompts, const int * lengths, const int * num_new, int * answers) {
    const int num_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    const int num_batch = (int) llama_n_batch(context);
    std::vector<const int *> prompt(num_requests);
    std::vector<int *> answer(num_requests);
    for (int i = 0; i < num_requests; ++i) {
        prompt[i] = prompts;
        answer[i] = answers;
        prompts += lengths[i];
        answers += num_new[i];
    }
    std::vector<Slot> slots(llama_n_seq_max(context));
    llama_batch batch = llama_batch_init(num_batch, 0, 1);
    int failed = 0, waiting = 0;
    while (failed == 0) {
        batch.n_tokens = 0;
        for (int id = 0; id < (int) slots.size(); ++id) {
            Slot & slot = slots[id];
            if (slot.request < 0 && waiting < num_requests) slot = {waiting, lengths[waiting], 0, -1}, ++waiting;
            slot.row = -1;
            if (slot.request < 0) continue;
            const int length = lengths[slot.request];
            for (; slot.computed < slot.known && batch.n_tokens < num_batch; ++slot.computed) {
                const int row = batch.n_tokens++, at = slot.computed;
                batch.token[row] = at < length ? prompt[slot.request][at] : answer[slot.request][at - length];
                batch.pos[row] = at;
                batch.n_seq_id[row] = 1;
                batch.seq_id[row][0] = id;
                batch.logits[row] = at + 1 == slot.known;
                if (batch.logits[row]) slot.row = row;
            }
        }
        if (batch.n_tokens == 0) break;
        failed = llama_decode(context, batch);
        for (int id = 0; id < (int) slots.size() && failed == 0; ++id) {
            Slot & slot = slots[id];
            if (slot.row < 0) continue;
            const float * logits = llama_get_logits_ith(context, slot.row);
            const int made = slot.known++ - lengths[slot.request];
            answer[slot.request][made] = (int) (std::max_element(logits, logits + num_vocab) - logits);
            if (made + 1 == num_new[slot.request]) {
                llama_memory_seq_rm(llama_get_memory(context), id, -1, -1);
                slot.request = -1;
            }
        }
    }
    llama_batch_free(batch);
    return failed;
}

}  // extern "C"
