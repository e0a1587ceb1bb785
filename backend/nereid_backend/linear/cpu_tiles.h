// SPDX-License-Identifier: Apache-2.0
// Matrix tiles (AMX). A tile is a register with at most 16 rows of 64 bytes. Special instructions multiply tiles.
//
// A processor core has eight tile registers. One instruction multiplies a tile of inputs by a tile of weights, and adds
// the product to a tile of sums:
//
//     sums [rows][16 outputs]  +=  inputs [rows][64 bytes]  *  weights [16][16 outputs][4 bytes]
//
// The 64 bytes of a row of inputs are 32 bfloat16 numbers or 64 integers of 8 bits. The weights of a layer are stored
// in the order of these tiles: cpu_linear.cpp and cpu_integers.h describe the layouts.

#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define NEREID_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;
constexpr int kBlockRows = 2 * kTileRows;  // the largest number of input rows that the tile registers can contain
constexpr int kLineBytes = 64;             // the size of a cache line
// The rows of the inputs are divided into chunks. A chunk has at most kChunkBytes bytes, but at least one block of
// rows, and fits into the second-level cache. tile_linear and tile_grouped_linear multiply a chunk by all panels before
// they read the next chunk.
constexpr int64_t kChunkBytes = 1 << 20;

// Returns whether this process may use tiles. The first call requests the permission from Linux. Linux requires this
// request, because it needs 8 KB more memory to save the registers of a thread that uses tiles.
inline bool has_tile_permission() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
  static const bool is_allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_allowed;
}

// The configuration of the tile registers of one thread. The intrinsic functions accept only literals as the numbers of
// registers, so the use of each register is fixed:
//
//     number of rows   registers with sums                            inputs    weights
//     1 to 16          0, 1, 2, 3: one register for each panel        4         5, 6, 7
//     17 to 32         0, 1: the first 16 rows, for two panels        4         6, 7
//                      2, 3: the other rows, for the same panels      5
//
// The destructor releases the registers. Otherwise, Linux would save their content whenever it switches threads.
class TileRegisters {
 public:
  ~TileRegisters() { _tile_release(); }

  // Configures the registers for 1 to 32 rows of inputs. If the number of rows differs from the previous call, all
  // registers become zero. `row_bytes` is the size of one row of a tile of inputs. It is 64. With at most 16 rows, it
  // can also be 32.
  void set_rows(int64_t rows, uint8_t row_bytes = kTileRowBytes) {
    if (rows == rows_) return;
    rows_ = rows;
    const bool has_two_tiles = rows > kTileRows;
    const auto first = static_cast<uint8_t>(has_two_tiles ? kTileRows : rows);
    const auto second = static_cast<uint8_t>(has_two_tiles ? rows - kTileRows : rows);
    const auto of_weights = static_cast<uint8_t>(row_bytes / 4);
    const uint8_t of_5 = has_two_tiles ? second : of_weights;
    const Shapes shapes = {1,
                           0,
                           {},
                           {kTileRowBytes, kTileRowBytes, kTileRowBytes, kTileRowBytes, row_bytes, kTileRowBytes,
                            kTileRowBytes, kTileRowBytes},
                           {first, first, second, second, first, of_5, of_weights, of_weights}};
    _tile_loadconfig(&shapes);
  }

 private:
  // The operand of the instruction LDTILECFG.
  struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Shapes) == 64);
  int64_t rows_ = 0;
};

}  // namespace

#endif
