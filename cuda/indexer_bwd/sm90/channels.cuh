// Channels of a head and of a key.
#pragma once

namespace cupymla::indexer_bwd {

constexpr int kD = CUPYMLA_D;
constexpr int kRowChunks = kD / 8;  // of 16 bytes

static_assert(kD == 64 || kD == 128);

}  // namespace cupymla::indexer_bwd
