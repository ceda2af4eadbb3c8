// Rows of the token table, out of its panels; scaled, and positions added where the model learns them. Bound: one line
// of each 64 bytes of the panel's blocks, since a row is a sixteenth of its panel: about 16 times its own bytes.
#include "ops/lanes.h"
#include "ops/row_ops.h"
#include "weights/repack.h"

namespace kvarto::KVARTO_ISA {

namespace {

void read_row(const Weight& table, int64_t row, float* out) {
    for (const Part& part : table.parts) {
        if (row < part.num_rows)
            return unpack_rows({part.format, part.group_size, table.num_columns}, part.data, row, row + 1, out);
        row -= part.num_rows;
    }
}

}  // namespace

void embed(const EmbedOp& op, const StepView& step, int64_t first_row, int64_t last_row) {
    const int32_t width = op.out.width;
    const F32x16 scale = F32x16::set1(op.scale);
    for (int64_t row = first_row; row < last_row; ++row) {
        float* out = op.out.f32(row);
        read_row(op.table, step.token_ids[row], out);
        if (op.scale == 1.0F && op.position_table == nullptr) continue;
        const float* place = op.position_table;
        if (place != nullptr) place += static_cast<int64_t>(step.positions[row]) * width;
        each_vector(width, [&](int32_t i, int32_t count) {
            F32x16 y = load_first(out + i, count) * scale;
            if (place != nullptr) y = y + load_first(place + i, count);
            store_first(y, out + i, count);
        });
    }
}

}  // namespace kvarto::KVARTO_ISA
