// Dot products of many rows by AMX tiles: sixteen directions by sixteen tokens, thirty-two elements of d_in a step.
#pragma once

#include "loraforge/cpu/lanes.h"

#if defined(LF_AVX512_BF16) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define LF_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace loraforge::cpu {

constexpr int kTile = 16;             // rows and columns of FP32 sums
constexpr int kStep = 2 * kTile;      // elements of d_in that one tile of an operand holds in a row
constexpr int kTileWords = kTile * kTile;  // 4-byte words in a tile
constexpr int kGroups = 4;            // groups of sixteen tokens that share a load of A

// Whether the system lets this process use tiles: it has to be asked, once.
inline bool tiles_allowed() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return allowed;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    // Tiles 0-3 hold sums and 4 directions, `live` rows each; 5-7 hold tokens.
    explicit TileConfig(int live) {
        for (int tile = 0; tile < 8; ++tile) {
            bytes[tile] = 4 * kTile;
            rows[tile] = uint8_t(tile <= 4 ? live : kTile);
        }
    }
};

// Rows of x as tiles [group][step][16 pairs][16 tokens], zero where there is no token or no element.
inline void tile_tokens(const uint16_t* x, int64_t stride, const int32_t* tokens, int rows, int d_in,
                        uint32_t* tiles) {
    for (int group = 0; group < rows; group += kTile)
        for (int k = 0; k < d_in; k += kStep, tiles += kTileWords) {
            const auto mask = uint32_t((uint64_t(1) << std::min(d_in - k, kStep)) - 1);
            __m512i lines[kTile] = {};
            for (int r = 0; r < kTile && group + r < rows; ++r)
                lines[r] = _mm512_maskz_loadu_epi16(mask, x + tokens[group + r] * stride + k);
            transpose(lines);
#pragma GCC unroll 16
            for (int p = 0; p < kTile; ++p) _mm512_storeu_si512(tiles + p * kTile, lines[p]);
        }
}

// sums[group][direction][token] of G groups of tokens, `apart` words from one to the next. `rest`: the elements of the
// directions past the last whole step, zero-padded, or null.
template <int G>
void tile_dots(const uint16_t* a, int d_in, const uint16_t* rest, const uint32_t* tiles, int64_t apart, float* sums) {
    const int64_t stride = int64_t(d_in) * int64_t(sizeof *a);
    const int whole = d_in / kStep;
    asm volatile("" ::: "memory");  // the tile instructions do not tell the compiler what they read
    _tile_zero(0);
    if constexpr (G > 1) _tile_zero(1);
    if constexpr (G > 2) _tile_zero(2);
    if constexpr (G > 3) _tile_zero(3);
    for (int step = 0; step < whole + (rest ? 1 : 0); ++step, tiles += kTileWords) {
        if (step < whole)
            _tile_loadd(4, a + step * kStep, stride);
        else
            _tile_loadd(4, rest, 4 * kTile);
        _tile_loadd(5, tiles, 4 * kTile);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (G > 1) {
            _tile_loadd(6, tiles + apart, 4 * kTile);
            _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (G > 2) {
            _tile_loadd(7, tiles + 2 * apart, 4 * kTile);
            _tile_dpbf16ps(2, 4, 7);
        }
        if constexpr (G > 3) {
            _tile_loadd(5, tiles + 3 * apart, 4 * kTile);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, sums, 4 * kTile);
    if constexpr (G > 1) _tile_stored(1, sums + kTileWords, 4 * kTile);
    if constexpr (G > 2) _tile_stored(2, sums + 2 * kTileWords, 4 * kTile);
    if constexpr (G > 3) _tile_stored(3, sums + 3 * kTileWords, 4 * kTile);
    asm volatile("" ::: "memory");
}

}  // namespace loraforge::cpu
#endif
