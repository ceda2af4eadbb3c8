#include "bindings/step_arrays.h"

#include <stdexcept>
#include <string>
#include <type_traits>

namespace nb = nanobind;

namespace kvarto {

namespace {

constexpr size_t kNumArrays = 40;  // of a step, its sampling and its result, so that no reallocation moves a buffer

template <class T> constexpr char type_code() {
    if constexpr (std::is_same_v<T, float>) return 'f';
    else if constexpr (std::is_same_v<T, int32_t>) return 'i';
    else if constexpr (std::is_same_v<T, int64_t>) return 'l';
    else return '?';
}

[[noreturn]] void refuse(const char* name, const std::string& what) {
    throw std::invalid_argument(std::string("step: `") + name + "` " + what);
}

int64_t num_elements(const Py_buffer& buffer) { return buffer.len / buffer.itemsize; }

}  // namespace

const Py_buffer& StepArrays::borrow(nb::handle array, const char* name, char type, bool is_written) {
    Py_buffer buffer;
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array.ptr(), &buffer, flags) != 0) {
        PyErr_Clear();
        refuse(name, "is no contiguous array");
    }
    buffers_.push_back(buffer);
    if (buffer.format == nullptr || buffer.format[0] != type || buffer.format[1] != '\0')
        refuse(name, std::string("has elements of type ") + (buffer.format ? buffer.format : "B") + ", not " + type);
    return buffers_.back();
}

template <class T> const T* StepArrays::array(nb::handle owner, const char* name, int64_t count) {
    const Py_buffer& buffer = borrow(nb::getattr(owner, name), name, type_code<T>(), false);
    if (num_elements(buffer) != count)
        refuse(name, "has " + std::to_string(num_elements(buffer)) + " elements, not " + std::to_string(count));
    return static_cast<const T*>(buffer.buf);
}

template <class T> T* StepArrays::result_array(nb::handle owner, const char* name, int64_t count) {
    const Py_buffer& buffer = borrow(nb::getattr(owner, name), name, type_code<T>(), true);
    if (num_elements(buffer) != count)
        refuse(name, "has " + std::to_string(num_elements(buffer)) + " elements, not " + std::to_string(count));
    return static_cast<T*>(buffer.buf);
}

StepArrays::StepArrays(nb::handle step, nb::handle page_tables, nb::handle slot_mapping, nb::handle result,
                       int32_t num_groups) {
    buffers_.reserve(kNumArrays);
    try {
        borrow_step(step);
        borrow_pages(page_tables, slot_mapping, num_groups);
        borrow_sampling(nb::getattr(step, "sampling"));
        borrow_result(result);
    } catch (...) {
        for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
        throw;
    }
}

StepArrays::~StepArrays() {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
}

void StepArrays::borrow_step(nb::handle step) {
    const Py_buffer& tokens = borrow(nb::getattr(step, "token_ids"), "token_ids", 'i', false);
    const Py_buffer& contexts = borrow(nb::getattr(step, "context_lens"), "context_lens", 'i', false);
    const Py_buffer& samples = borrow(nb::getattr(step, "sample_rows"), "sample_rows", 'i', false);
    StepView& view = view_;
    view.num_tokens = static_cast<int32_t>(num_elements(tokens));
    view.num_seqs = static_cast<int32_t>(num_elements(contexts));
    view.num_samples = static_cast<int32_t>(num_elements(samples));
    view.token_ids = static_cast<const int32_t*>(tokens.buf);
    view.context_lens = static_cast<const int32_t*>(contexts.buf);
    view.sample_rows = static_cast<const int32_t*>(samples.buf);
    view.positions = array<int32_t>(step, "positions", view.num_tokens);
    view.cu_seqlens = array<int32_t>(step, "cu_seqlens", view.num_seqs + 1);
    if (nb::getattr(step, "adapters").is_none() != nb::getattr(step, "adapter_starts").is_none())
        refuse("adapters", "and `adapter_starts` are both there, or neither");
    if (nb::getattr(step, "adapters").is_none()) return;
    view.adapters = array<int32_t>(step, "adapters", view.num_seqs);
    view.adapter_starts = array<int32_t>(step, "adapter_starts", view.num_seqs);
}

void StepArrays::borrow_pages(nb::handle page_tables, nb::handle slot_mapping, int32_t num_groups) {
    const Py_buffer& tables = borrow(page_tables, "page_tables", 'i', false);
    if (tables.ndim != 3 || tables.shape[0] != num_groups || tables.shape[1] != view_.num_seqs)
        refuse("page_tables", "is not [" + std::to_string(num_groups) + ", num_seqs, max_pages]");
    view_.max_pages = static_cast<int32_t>(tables.shape[2]);
    view_.page_tables = static_cast<const int32_t*>(tables.buf);
    const Py_buffer& slots = borrow(slot_mapping, "slot_mapping", 'l', false);
    if (slots.ndim != 2 || slots.shape[0] != num_groups || slots.shape[1] != view_.num_tokens)
        refuse("slot_mapping", "is not [" + std::to_string(num_groups) + ", num_tokens]");
    view_.slot_mapping = static_cast<const int64_t*>(slots.buf);
}

void StepArrays::borrow_sampling(nb::handle sampling) {
    SamplingView& view = view_.sampling;
    const int64_t count = view_.num_samples;
    view.temperature = array<float>(sampling, "temperature", count);
    view.top_k = array<int32_t>(sampling, "top_k", count);
    view.top_p = array<float>(sampling, "top_p", count);
    view.min_p = array<float>(sampling, "min_p", count);
    view.repetition_penalty = array<float>(sampling, "repetition_penalty", count);
    view.presence_penalty = array<float>(sampling, "presence_penalty", count);
    view.frequency_penalty = array<float>(sampling, "frequency_penalty", count);
    view.seed = array<int64_t>(sampling, "seed", count);
    view.choice = array<int32_t>(sampling, "choice", count);
    view.position = array<int32_t>(sampling, "position", count);
    view.num_logprobs = array<int32_t>(sampling, "num_logprobs", count);
    view.target = array<int32_t>(sampling, "target", count);
    view.bias_indptr = array<int32_t>(sampling, "bias_indptr", count + 1);
    view.seen_indptr = array<int32_t>(sampling, "seen_indptr", count + 1);
    const int64_t num_bias = view.bias_indptr[count], num_seen = view.seen_indptr[count];
    view.bias_ids = array<int32_t>(sampling, "bias_ids", num_bias);
    view.bias_values = array<float>(sampling, "bias_values", num_bias);
    view.seen_ids = array<int32_t>(sampling, "seen_ids", num_seen);
    view.seen_output_counts = array<int32_t>(sampling, "seen_output_counts", num_seen);
}

void StepArrays::borrow_result(nb::handle result) {
    ResultView& view = view_.result;
    const int64_t count = view_.num_samples;
    const Py_buffer& top_ids = borrow(nb::getattr(result, "top_ids"), "top_ids", 'i', true);
    if (top_ids.ndim != 2 || top_ids.shape[0] != count) refuse("top_ids", "is not [num_samples, k]");
    view.num_top = static_cast<int32_t>(top_ids.shape[1]);
    view.top_ids = static_cast<int32_t*>(top_ids.buf);
    view.top_logprobs = result_array<float>(result, "top_logprobs", count * view.num_top);
    view.token_ids = result_array<int32_t>(result, "token_ids", count);
    view.logprobs = result_array<float>(result, "logprobs", count);
    view.is_finite = reinterpret_cast<uint8_t*>(result_array<bool>(result, "is_finite", count));
}

}  // namespace kvarto
