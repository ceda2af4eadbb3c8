#include "adapters/pack_plan.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "adapters/coded_rows.h"
#include "adapters/file_rows.h"
#include "memory/stream_copy.h"

namespace kvarto {

namespace {

constexpr int64_t kMostElements = int64_t{1} << 48;  // sizes of a few of them do not overflow

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument("packing: " + what);
}

// How long rows may be: some are read at once.
int64_t most_row_bytes(const FileTensor& tensor) {
    if (!has_codes(tensor.strips)) return kMostAtOnce;
    if (!tensor.is_transposed) return kMostAtOnce * tensor.item_bytes() / int64_t{sizeof(float)};
    return kMostRowsBytes * tensor.item_bytes() / int64_t{sizeof(float)} / rows_together(tensor);
}

void check(const FileTensor& tensor, int64_t file_bytes, int64_t target_bytes) {
    require(tensor.type <= FileType::kQ8_0, "no such type of tensors");
    require(tensor.num_rows > 0 && tensor.num_columns > 0, "a tensor without values");
    require(tensor.num_rows <= kMostElements / tensor.num_columns, "a tensor of too many values");
    require(tensor.type != FileType::kQ8_0 || tensor.num_columns % 32 == 0, "a row that is no whole number of blocks");
    require(tensor.num_heads >= 0 && tensor.num_heads <= tensor.num_rows, "more heads than rows");
    require(tensor.num_heads == 0 || tensor.num_rows % (2 * tensor.num_heads) == 0, "rows that make no whole heads");
    require(tensor.strips <= StripType::kQ4, "no such type of strips");
    require(has_codes(tensor.strips) || tensor.strips == tensor.value_type(), "values of another type");
    require(tensor.strip_columns() % block_columns(tensor.strips) == 0, "a strip that ends inside a block");
    require(!tensor.is_rearranged() || tensor.row_bytes() <= most_row_bytes(tensor), "a row too long to be rearranged");
    require(tensor.offset >= 0 && tensor.offset <= file_bytes - tensor.file_bytes(), "a tensor outside of the file");
    require(tensor.start >= 0 && tensor.start <= target_bytes - tensor.size_bytes(), "a tensor outside of its target");
    require(tensor.start % alignment(tensor.strips) == 0, "a tensor that begins inside a value");
}

bool is_aligned(std::span<std::byte> target) { return reinterpret_cast<uintptr_t>(target.data()) % 4 == 0; }

}  // namespace

PackPlan::PackPlan(std::vector<FileTensor> tensors, int64_t file_bytes, int64_t stream_bytes, int64_t beside_bytes)
    : tensors_(std::move(tensors)), stream_bytes_(stream_bytes), beside_bytes_(beside_bytes) {
    require(file_bytes >= 0 && stream_bytes >= 0 && beside_bytes >= 0, "a negative size");
    for (const FileTensor& tensor : tensors_) check(tensor, file_bytes, tensor.is_beside ? beside_bytes : stream_bytes);
    order_.resize(tensors_.size());
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::ranges::stable_sort(order_, {}, [this](size_t index) { return tensors_[index].offset; });
    for (const FileTensor& tensor : tensors_) end_ = std::max(end_, tensor.offset + tensor.file_bytes());
    stream_gaps_ = gaps(false, stream_bytes);
    beside_gaps_ = gaps(true, beside_bytes);
}

std::vector<PackPlan::Gap> PackPlan::gaps(bool is_beside, int64_t size_bytes) const {
    std::vector<Gap> filled, found;
    for (const FileTensor& tensor : tensors_)
        if (tensor.is_beside == is_beside) filled.push_back({tensor.start, tensor.start + tensor.size_bytes()});
    std::ranges::sort(filled, {}, &Gap::start);
    int64_t end = 0;
    for (const Gap& each : filled) {
        require(each.start >= end, "two tensors in one place");
        if (each.start > end) found.push_back({end, each.start});
        end = each.end;
    }
    if (end < size_bytes) found.push_back({end, size_bytes});
    return found;
}

// A tensor whose pages do not follow each other is cut where a page ends; what cannot be cut, for its rows become
// columns or codes, is put together first: of many tensors in a page, one is its last.
PackPlan::Result PackPlan::read(FileReader& reader, const FileTensor& tensor, const PackKernels& kernels,
                                const PagedStream& stream) {
    const int64_t size = tensor.size_bytes();
    if (const std::span<std::byte> all = stream.run(tensor.start, size); std::cmp_equal(all.size(), size))
        return read_tensor(reader, tensor, kernels, all.data(), false);
    if (!tensor.stays_as_it_lies()) {
        const auto whole = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(size));
        const Result result = read_tensor(reader, tensor, kernels, whole.get(), true);
        if (result.end == End::kDone) stream.put(tensor.start, {whole.get(), static_cast<size_t>(size)});
        return result;
    }
    FileTensor part = tensor;
    part.num_rows = 1;
    for (int64_t done = 0; done < size; done += part.row_bytes()) {
        const std::span<std::byte> here = stream.run(tensor.start + done, size - done);
        part.offset = tensor.offset + done;
        part.num_columns = static_cast<int64_t>(here.size()) / tensor.item_bytes();
        const Result result = read_tensor(reader, part, kernels, here.data(), false);
        if (result.end != End::kDone) return result;
    }
    return {};
}

PackPlan::Result PackPlan::pack(const PackKernels& kernels, int file, const PagedStream& stream,
                                std::span<std::byte> beside, bool may_be_direct) const {
    require(stream.size() >= stream_bytes_, "the stream has no room");
    require(std::cmp_greater_equal(beside.size(), beside_bytes_) && is_aligned(beside), "what goes beside has no room");
    FileReader reader(file, end_, may_be_direct);
    const StreamFence fence;
    for (const size_t index : order_) {
        const FileTensor& tensor = tensors_[index];
        Result result = tensor.is_beside ? read_tensor(reader, tensor, kernels, beside.data() + tensor.start, false)
                                         : read(reader, tensor, kernels, stream);
        result.tensor = static_cast<int64_t>(index);
        result.num_direct_bytes = reader.num_direct_bytes();
        if (result.end != End::kDone) return result;
    }
    for (const Gap& gap : stream_gaps_) stream.clear(gap.start, gap.end);
    for (const Gap& gap : beside_gaps_) std::fill(beside.begin() + gap.start, beside.begin() + gap.end, std::byte{0});
    stream.clear(stream_bytes_, stream.size());
    return {.num_direct_bytes = reader.num_direct_bytes()};
}

}  // namespace kvarto
