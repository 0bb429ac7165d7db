// Channels of an index head and of a key.
#pragma once

namespace cupymla::indexer_loss_dense {

constexpr int kD = CUPYMLA_D;

static_assert(kD == 64 || kD == 128);

}  // namespace cupymla::indexer_loss_dense
