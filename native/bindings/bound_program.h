// A program under construction: offsets into the arena become addresses, and none may lie outside.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/adapters.h"
#include "core/executor.h"
#include "core/step_check.h"

namespace kvarto {

// A buffer at an offset of the arena; see core/rows.h.
struct RowsAt {
    int64_t offset;
    int64_t row_bytes;
    int32_t width;
    int32_t num_rows;
    int32_t form;  // place in RowForm
    bool per_sample;
};

// A band of a matrix; see weights/format.h. `format` is the place in the enumeration.
struct PartAt {
    int32_t format;
    int32_t group_size;
    int32_t num_rows;
    int64_t offset;
};

struct WeightAt {
    int32_t num_rows;
    int32_t num_columns;
    std::vector<PartAt> parts;
};

struct BytesAt {
    int64_t offset;
    int64_t size_bytes;
};

struct PagesAt {
    int64_t offset;
    int64_t page_bytes;
    int64_t layer_bytes;
    int32_t page_size;
    int32_t type;  // place in KVType
};

// Strips of an adapter; see core/adapters.h. `type` is the place in StripType.
struct StripsAt {
    int64_t start;
    int32_t num_strips;
    int32_t num_columns;
    int32_t type;
};

struct UpdateAt {
    int32_t op;
    int32_t first_row;
    float scaling;
    StripsAt a, b;
    std::optional<StripsAt> bias, magnitude;
};

struct TokensAt {
    int32_t op;
    StripsAt rows;
    std::vector<int32_t> token_ids;  // of each row
};

// What adapters of one shape have in common, checked against a program: all but their pages.
class AdapterShape {
public:
    int64_t end_bytes() const { return end_bytes_; }  // behind the last strip

private:
    friend class BoundProgram;
    uint64_t program_ = 0;  // the number of the one it was checked against
    std::vector<AdapterUpdate> updates_;
    std::vector<AdapterTokens> tokens_;
    int64_t end_bytes_ = 0;
};

class BoundProgram {
public:
    BoundProgram(const std::string& isa, int32_t num_threads, uintptr_t arena, int64_t arena_bytes, StepBounds bounds);

    void add_embed(RowsAt out, const WeightAt& table, float scale, std::optional<int64_t> position_table,
                   std::optional<RowsAt> sums);
    void add_norm(RowsAt x, RowsAt out, std::optional<RowsAt> residual, int64_t weight, std::optional<int64_t> bias,
                  int32_t kind, float eps);
    void add_head_norm(RowsAt qkv, int64_t q_weight, int64_t k_weight, HeadShape heads, float eps);
    void add_rope(RowsAt qkv, HeadShape heads, std::vector<float> inv_freq, float attention_factor);
    void add_write_kv(RowsAt qkv, HeadShape heads, int32_t group, int32_t layer_slot, const PagesAt& pages);
    void add_attention(RowsAt qkv, RowsAt out, HeadShape heads, int32_t group, int32_t layer_slot, float scale,
                       int32_t window, float softcap, bool is_exact, const PagesAt& pages, BytesAt scratch);
    void add_gated_activation(RowsAt x, RowsAt out, int32_t activation, bool may_fuse);
    void add_activate(RowsAt x, RowsAt out, int32_t activation);
    void add_gather(RowsAt x, RowsAt out);
    void add_linear(RowsAt x, RowsAt out, const WeightAt& weight, std::optional<int64_t> bias, int32_t products,
                    BytesAt scratch, std::optional<RowsAt> sums);
    void add_route(RowsAt x, RowsAt ids, RowsAt shares, const WeightAt& weight, int32_t top_k, bool normalise,
                   BytesAt scratch);
    void add_experts(RowsAt x, RowsAt ids, RowsAt shares, RowsAt out, const std::vector<WeightAt>& gate_up,
                     const std::vector<WeightAt>& down, int32_t activation, int32_t top_k, BytesAt scratch);
    void add_logits(RowsAt x, RowsAt out, const WeightAt& weight, std::optional<int64_t> bias, float scale,
                    float softcap, int32_t products, BytesAt scratch, RowsAt summaries, std::optional<RowsAt> sums);
    void add_sample(RowsAt logits, std::optional<RowsAt> summaries, BytesAt scratch);

    // Everything that a kernel would use as an address is looked at, once for all adapters of the shape; throws
    // std::invalid_argument.
    AdapterShape adapter_shape(const std::vector<UpdateAt>& updates, const std::vector<TokensAt>& tokens) const;
    // Lets steps name an adapter whose stream lies in these pages of the pool. Throws std::invalid_argument.
    void bind_adapter(int32_t handle, const PagesAt& pool, const std::vector<int32_t>& pages,
                      const AdapterShape& shape);
    void unbind_adapter(int32_t handle);

    // One pass; other Python threads run meanwhile.
    void run(nanobind::handle step, nanobind::handle page_tables, nanobind::handle slot_mapping,
             nanobind::handle result);
    // The same, measured: for each phase its first op and its seconds.
    std::vector<std::pair<int64_t, double>> run_timed(nanobind::handle step, nanobind::handle page_tables,
                                                      nanobind::handle slot_mapping, nanobind::handle result);
    int64_t num_phases() const { return executor_.num_phases(); }

private:
    std::byte* at(int64_t offset, int64_t size_bytes) const;
    std::byte* at(BytesAt bytes) const { return at(bytes.offset, bytes.size_bytes); }
    const float* floats(int64_t offset, int64_t count) const;
    const float* floats(std::optional<int64_t> offset, int64_t count) const;
    Rows rows(const RowsAt& rows) const;
    Rows rows(const std::optional<RowsAt>& rows) const;
    Weight weight(const WeightAt& weight) const;
    std::vector<Weight> weights(const std::vector<WeightAt>& weights) const;
    KVPages pages(const PagesAt& pages) const;
    LinearOp linear(const RowsAt& x, const RowsAt& out, const WeightAt& weight, std::optional<int64_t> bias,
                    int32_t products, BytesAt scratch) const;

    Rows sums(const std::optional<RowsAt>& sums, int32_t num_rows) const;
    void check_step(const StepView& step) const;

    uint64_t number_;  // of programs in this process: one that takes the place of another has another
    std::byte* arena_;
    int64_t arena_bytes_;
    StepBounds bounds_;
    bool has_tiles_;
    AdapterTable adapters_;
    Executor executor_;
};

}  // namespace kvarto
