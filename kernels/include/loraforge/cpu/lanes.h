// Sixteen FP32 lanes and the 16-bit operands that feed them. AVX-512 where the compiler may use it, with AVX512-BF16
// dot products where it may use those; elsewhere the compiler's own vectors and loops that it vectorises by itself.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LF_AVX512 1
#include <immintrin.h>
#endif
#if defined(LF_AVX512) && defined(__AVX512BF16__)
#define LF_AVX512_BF16 1
#endif

namespace loraforge::cpu {

constexpr int kLanes = 16;

#ifdef LF_AVX512
using Lanes = __m512;
#else
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
#endif

inline Lanes broadcast(float value) {
#ifdef LF_AVX512
    return _mm512_set1_ps(value);
#else
    Lanes lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = value;
    return lanes;
#endif
}

inline Lanes load_lanes(const float* from) {
    Lanes value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store_lanes(float* to, Lanes value) { std::memcpy(to, &value, sizeof value); }

// bfloat16: the upper half of an FP32 number.
struct Bf16 {
    static float widen(uint16_t bits) {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }

    static uint16_t narrow(float value) {  // to nearest, ties to even; NaN stays NaN
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        if (value != value) return uint16_t(bits >> 16 | 0x40);
        return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }

#ifdef LF_AVX512
    static Lanes widen(__m256i bits) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    // The even and the odd of sixteen pairs.
    static Lanes even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
    static Lanes odd(__m512i pairs) {
        return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
    }
    static __m256i narrow(Lanes value) {
#ifdef LF_AVX512_BF16
        return (__m256i)_mm512_cvtneps_pbh(value);
#else
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i tie = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), tie);
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
    }
#endif
};

// IEEE half precision.
struct Fp16 {
    static float widen(uint16_t bits) {
        _Float16 value;
        std::memcpy(&value, &bits, sizeof value);
        return float(value);
    }

    static uint16_t narrow(float value) {
        const _Float16 half = _Float16(value);
        uint16_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        return bits;
    }

#ifdef LF_AVX512
    static Lanes widen(__m256i bits) { return _mm512_cvtph_ps(bits); }
    static Lanes even(__m512i pairs) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)); }
    static Lanes odd(__m512i pairs) { return even(_mm512_srli_epi32(pairs, 16)); }
    static __m256i narrow(Lanes value) {
        return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
#endif
};

// The first `n` of sixteen elements; the other lanes are zero. Nothing past `n` is touched.
template <class T>
inline Lanes load(const uint16_t* from, int n) {
#ifdef LF_AVX512
    if (__builtin_constant_p(n) && n == kLanes) return T::widen(_mm256_loadu_si256((const __m256i*)from));
    return T::widen(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), from));
#else
    Lanes value{};
    if (n == kLanes)
        for (int i = 0; i < kLanes; ++i) value[i] = T::widen(from[i]);
    else
        for (int i = 0; i < n; ++i) value[i] = T::widen(from[i]);
    return value;
#endif
}

template <class T>
inline void store(uint16_t* to, Lanes value, int n) {
#ifdef LF_AVX512
    _mm256_mask_storeu_epi16(to, __mmask16((1u << n) - 1), T::narrow(value));
#else
    if (n == kLanes)
        for (int i = 0; i < kLanes; ++i) to[i] = T::narrow(value[i]);
    else
        for (int i = 0; i < n; ++i) to[i] = T::narrow(value[i]);
#endif
}

template <class T>
inline void store_two(uint16_t* to, Lanes low, Lanes high) {
#ifdef LF_AVX512_BF16
    if constexpr (std::is_same_v<T, Bf16>) {  // twice as fast as one at a time
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        return;
    }
#endif
    store<T>(to, low, kLanes);
    store<T>(to + kLanes, high, kLanes);
}

// What one step of a dot product takes from each factor, and how it is added up.
template <class T>
struct Dot {
    static constexpr int kStep = kLanes;
    using Chunk = Lanes;
    static Chunk take(const uint16_t* from) { return load<T>(from, kLanes); }
    static Chunk take(const uint16_t* from, int n) { return load<T>(from, n); }
    static Lanes add(Lanes sum, Chunk a, Chunk b) { return sum + a * b; }
};

#ifdef LF_AVX512_BF16
template <>
struct Dot<Bf16> {
    static constexpr int kStep = 2 * kLanes;
    using Chunk = __m512bh;
    static Chunk take(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Chunk take(const uint16_t* from, int n) {
        return (__m512bh)_mm512_maskz_loadu_epi16(uint32_t((uint64_t(1) << n) - 1), from);
    }
    static Lanes add(Lanes sum, Chunk a, Chunk b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#endif

// Sums of the lanes of four vectors; the order of the additions is the same for each of them.
inline void sum4(Lanes a, Lanes b, Lanes c, Lanes d, float (&sums)[4]) {
#ifdef LF_AVX512
    const Lanes ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    const Lanes cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    const Lanes abcd = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))) +
                       _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    const __m256 half = _mm512_castps512_ps256(abcd) + _mm512_extractf32x8_ps(abcd, 1);
    _mm_storeu_ps(sums, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
    const Lanes* each[4] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; ++i) {
        float part[kLanes];
        store_lanes(part, *each[i]);
        for (int width = kLanes / 2; width > 0; width /= 2)
            for (int lane = 0; lane < width; ++lane) part[lane] += part[lane + width];
        sums[i] = part[0];
    }
#endif
}

#ifdef LF_AVX512
// Move the lowest log2(L) bits of a dword's place among L vectors to the top: [16][L] becomes [L][16].
template <int L>
inline void transpose(__m512i (&rows)[L]) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#pragma GCC unroll 4
    for (int done = 1; done < L; done *= 2) {
        __m512i next[L];
#pragma GCC unroll 8
        for (int i = 0; i < L / 2; ++i) {
            next[i] = _mm512_permutex2var_epi32(rows[2 * i], even, rows[2 * i + 1]);
            next[L / 2 + i] = _mm512_permutex2var_epi32(rows[2 * i], odd, rows[2 * i + 1]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) rows[i] = next[i];
    }
}

// 2 L directions of each of sixteen rows of B, as dwords [16][L].
template <int L>
inline void gather_rows(const uint16_t* b, int64_t width, __m512i (&rows)[L]) {
    if (width == 2 * L) {  // one run of memory
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) rows[i] = _mm512_loadu_si512(b + i * 2 * kLanes);
    } else if constexpr (L == 16) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) rows[i] = _mm512_loadu_si512(b + i * width);
    } else if constexpr (L == 8) {
#pragma GCC unroll 8
        for (int i = 0; i < L; ++i, b += 2 * width)
            rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)b)),
                                         _mm256_loadu_si256((const __m256i*)(b + width)), 1);
    } else if constexpr (L == 4) {
#pragma GCC unroll 4
        for (int i = 0; i < L; ++i, b += 4 * width) {
            __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)b));
            four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i*)(b + width)), 1);
            four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i*)(b + 2 * width)), 2);
            rows[i] = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i*)(b + 3 * width)), 3);
        }
    } else if constexpr (L == 2) {
        const __m512i step = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
        const __m512i place = _mm512_mullo_epi64(step, _mm512_set1_epi64(width));
#pragma GCC unroll 2
        for (int i = 0; i < L; ++i, b += 8 * width) rows[i] = _mm512_i64gather_epi64(place, b, 2);
    } else {
        const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        rows[0] = _mm512_i32gather_epi32(_mm512_mullo_epi32(step, _mm512_set1_epi32(int(width))), b, 2);
    }
}
#endif

}  // namespace loraforge::cpu
