// A Step and a StepResult of kvarto.core.step, borrowed as raw pointers while a pass runs.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "core/step.h"

namespace kvarto {

// Holds the buffers of a step's arrays; needs the interpreter's lock when made and when it goes.
class StepArrays {
public:
    // Throws std::invalid_argument that names an array of the wrong type, shape or layout.
    StepArrays(nanobind::handle step, nanobind::handle result, int32_t num_groups);
    ~StepArrays();
    StepArrays(const StepArrays&) = delete;
    StepArrays& operator=(const StepArrays&) = delete;
    const StepView& view() const { return view_; }

private:
    void borrow_step(nanobind::handle step, int32_t num_groups);
    void borrow_sampling(nanobind::handle sampling);
    void borrow_result(nanobind::handle result);
    const Py_buffer& borrow(nanobind::handle owner, const char* name, char type, bool is_written);
    // The array `owner.name` as T's; its first axis has `count` elements where that is known.
    template <class T> const T* array(nanobind::handle owner, const char* name, int64_t count);
    template <class T> T* result_array(nanobind::handle owner, const char* name, int64_t count);

    std::vector<Py_buffer> buffers_;
    StepView view_{};
};

}  // namespace kvarto
