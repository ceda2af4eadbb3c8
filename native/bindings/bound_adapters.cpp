// Adapters of a program: places in the pool become addresses, and none may lie outside.
#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "bindings/bound_program.h"

namespace kvarto {

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 60;  // sums of a few of them do not overflow

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument("adapter: " + what);
}

Strips strips(const StripsAt& at) {
    require(at.type >= 0 && at.type <= static_cast<int32_t>(StripType::kQ4), "no such type of strips");
    require(at.start >= 0 && at.num_strips > 0 && at.num_columns > 0, "strips without bytes");
    const Strips made{at.start, at.num_strips, at.num_columns, static_cast<StripType>(at.type)};
    require(at.num_columns % block_columns(made.type) == 0, "strips that end inside a block");
    require(at.start <= kMostBytes && at.start % alignment(made.type) == 0, "strips begin nowhere");
    require(at.num_strips <= kMostBytes / made.strip_bytes(), "strips are too many");
    return made;
}

Strips strips(const std::optional<StripsAt>& at) { return at ? strips(*at) : Strips{}; }

// What an op reads, writes, and keeps sums for; of one whose tokens may be replaced, the rows of its weight.
struct Widths {
    int32_t in = 0, out = 0, ranks = 0, num_tokens = 0, token_width = 0;
};

Widths widths(const AnyOp& any) {
    if (const auto* linear = std::get_if<LinearOp>(&any))
        return {linear->x.width, linear->out.width, linear->sums.width};
    if (const auto* logits = std::get_if<LogitsOp>(&any)) {
        const LinearOp& product = logits->linear;
        const int32_t in = product.x.width, num_tokens = product.weight.num_rows;
        return {in, num_tokens, product.sums.width, num_tokens, in};
    }
    if (const auto* embed = std::get_if<EmbedOp>(&any)) {
        const int32_t out = embed->out.width, num_tokens = embed->table.num_rows;
        return {num_tokens, out, embed->sums.width, num_tokens, out};
    }
    return {};
}

void check(const AdapterUpdate& update, int32_t first_rank, const Widths& op) {
    require(op.ranks > 0, "op " + std::to_string(update.op) + " was not planned for updates");
    require(update.a.num_columns == op.in, "A has another width than what the op reads");
    require(update.b.num_strips == update.rank(), "A and B have different ranks");
    const bool is_inside = update.first_row >= 0 && update.first_row <= op.out - update.b.num_columns;
    require(is_inside, "rows that the op does not write");
    require(first_rank <= op.ranks - update.rank(), "larger ranks than were planned for");
    for (const Strips& vector : {update.bias, update.magnitude}) {
        require(vector.num_strips == 0 || (vector.num_strips == 1 && vector.num_columns == update.b.num_columns),
                "a vector beside B of another length");
        require(!has_codes(vector.type), "a vector of codes");
    }
}

void check(const AdapterTokens& tokens, const Widths& op) {
    require(op.ranks > 0, "op " + std::to_string(tokens.op) + " was not planned for other tokens");
    require(tokens.rows.num_columns == op.token_width, "rows of tokens of another width");
    require(!has_codes(tokens.rows.type), "rows of tokens in codes");
    const bool is_inside = tokens.token_ids.front() >= 0 && tokens.token_ids.back() < op.num_tokens;
    require(is_inside, "tokens that the op does not have");
}

std::vector<AdapterUpdate> updates_at(const std::vector<UpdateAt>& updates, int32_t num_ops) {
    std::vector<AdapterUpdate> made;
    for (const UpdateAt& at : updates) {
        require(at.op >= 0 && at.op < num_ops, "no op " + std::to_string(at.op));
        require(made.empty() || made.back().op <= at.op, "updates in another order than ops");
        made.push_back({at.op, at.first_row, at.scaling, strips(at.a), strips(at.b), strips(at.bias),
                        strips(at.magnitude)});
    }
    return made;
}

AdapterTokens tokens_at(const TokensAt& at, int32_t num_ops) {
    require(at.op >= 0 && at.op < num_ops, "no op " + std::to_string(at.op));
    AdapterTokens made{at.op, strips(at.rows), at.token_ids, at.token_ids, std::vector<int32_t>(at.token_ids.size())};
    require(std::cmp_equal(at.token_ids.size(), made.rows.num_strips), "other tokens than rows");
    std::iota(made.strips.begin(), made.strips.end(), 0);
    std::ranges::sort(made.strips, {}, [&at](int32_t strip) { return at.token_ids[static_cast<size_t>(strip)]; });
    std::ranges::sort(made.token_ids);
    return made;
}

}  // namespace

AdapterShape BoundProgram::adapter_shape(const std::vector<UpdateAt>& updates,
                                         const std::vector<TokensAt>& tokens) const {
    AdapterShape shape;
    shape.program_ = number_;
    shape.updates_ = updates_at(updates, executor_.num_ops());
    for (const TokensAt& at : tokens) shape.tokens_.push_back(tokens_at(at, executor_.num_ops()));
    int32_t first_rank = 0;
    const AdapterUpdate* before = nullptr;
    for (const AdapterUpdate& each : shape.updates_) {
        first_rank = before != nullptr && before->op == each.op ? first_rank + before->rank() : 0;
        check(each, first_rank, widths(executor_.op(each.op)));
        for (const Strips& strips : {each.a, each.b, each.bias, each.magnitude})
            shape.end_bytes_ = std::max(shape.end_bytes_, strips.end());
        before = &each;
    }
    for (const AdapterTokens& each : shape.tokens_) {
        check(each, widths(executor_.op(each.op)));
        shape.end_bytes_ = std::max(shape.end_bytes_, each.rows.end());
    }
    return shape;
}

void BoundProgram::bind_adapter(int32_t handle, const PagesAt& pool, const std::vector<int32_t>& pages,
                                const AdapterShape& shape) {
    require(handle >= 0 && handle < kMaxAdapters && !adapters_.is_bound(handle), "a handle that is not free");
    require(shape.program_ == number_, "a shape that was checked against another program");
    require(pool.page_bytes >= 2048 && pool.page_bytes % 64 == 0, "pages too small for a piece of a strip");
    const std::byte* first = this->pages(pool).data;
    std::vector<const std::byte*> places;
    for (const int32_t page : pages) {
        require(page >= 0 && page < bounds_.num_pages, "no page " + std::to_string(page));
        places.push_back(first + page * pool.page_bytes);
    }
    const auto size_bytes = pool.page_bytes * static_cast<int64_t>(pages.size());
    require(shape.end_bytes() <= size_bytes, "strips behind the end of the pages");
    adapters_.bind(handle, std::make_unique<const Adapter>(pool.page_bytes, std::move(places), shape.updates_,
                                                           shape.tokens_, executor_.num_ops()));
}

void BoundProgram::unbind_adapter(int32_t handle) {
    require(handle >= 0 && handle < kMaxAdapters && adapters_.is_bound(handle), "a handle that is not bound");
    adapters_.unbind(handle);
}

}  // namespace kvarto
