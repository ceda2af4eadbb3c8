// A Step and a StepResult of kvarto.core.step, borrowed as raw pointers while a pass runs.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "core/step.h"

namespace kvarto {

// Holds the buffers of a step's arrays; needs the interpreter's lock when made and when it goes.
class StepArrays {
public:
    // `page_tables` and `slot_mapping` are the step's, made contiguous: it may hold slices of larger ones. Throws
    // std::invalid_argument that names an array of the wrong type, shape or layout.
    StepArrays(nanobind::handle step, nanobind::handle page_tables, nanobind::handle slot_mapping,
               nanobind::handle result, int32_t num_groups);
    ~StepArrays();
    StepArrays(const StepArrays&) = delete;
    StepArrays& operator=(const StepArrays&) = delete;
    const StepView& view() const { return view_; }

private:
    void borrow_step(nanobind::handle step);
    void borrow_pages(nanobind::handle page_tables, nanobind::handle slot_mapping, int32_t num_groups);
    void borrow_sampling(nanobind::handle sampling);
    void borrow_result(nanobind::handle result);
    // The buffer of an array of that element type; `name` is for messages.
    const Py_buffer& borrow(nanobind::handle array, const char* name, char type, bool is_written);
    // The array `owner.name`, of `count` T's.
    template <class T> const T* array(nanobind::handle owner, const char* name, int64_t count);
    template <class T> T* result_array(nanobind::handle owner, const char* name, int64_t count);

    std::vector<Py_buffer> buffers_;
    StepView view_{};
};

}  // namespace kvarto
