// Vectors of 16-bit numbers, as wide as F: taken apart into two vectors of 32-bit lanes, and put together again.
//
// Of each eight numbers the first four go to `low` and the others to `high`, as x86 interleaves and packs them.

#pragma once

#include <utility>

#include "lanes.h"

namespace lanes {

typedef std::int16_t S __attribute__((vector_size(4 * W)));  // 2 * W numbers
typedef std::uint8_t Q __attribute__((vector_size(4 * W)));  // two bytes to a number
typedef std::uint8_t Bytes __attribute__((vector_size(2 * W)));

struct Wide {
    F low, high;
};

inline S least(S a, S b) { return a < b ? a : b; }
inline S most(S a, S b) { return a > b ? a : b; }
inline Q most(Q a, Q b) { return a > b ? a : b; }

// a[0] b[0] a[1] b[1] ... of the first (SECOND: of the second) halves of each 16 bytes.
template <bool SECOND, int... i> inline S interleaved(S a, S b, std::integer_sequence<int, i...>) {
    return __builtin_shuffle(a, b, S{(i % 2 * 2 * W + i / 8 * 8 + SECOND * 4 + i % 8 / 2)...});
}
inline S interleave_low(S a, S b) { return interleaved<false>(a, b, std::make_integer_sequence<int, 2 * W>()); }
inline S interleave_high(S a, S b) { return interleaved<true>(a, b, std::make_integer_sequence<int, 2 * W>()); }

// fp32 out of the bits of fp16 (HALF) or bf16.
template <bool HALF> inline Wide widen(S x) {
    if constexpr (HALF) return {widen<HALF>((I)interleave_low(x, S{})), widen<HALF>((I)interleave_high(x, S{}))};
    return {floats((I)interleave_low(S{}, x)), floats((I)interleave_high(S{}, x))};
}

// Numbers without sign.
inline std::pair<I, I> wide(S x) { return {(I)interleave_low(x, S{}), (I)interleave_high(x, S{})}; }

// Whole numbers, times 2**16.
inline Wide numbers_by_2_16(S x) { return {numbers((I)interleave_low(S{}, x)), numbers((I)interleave_high(S{}, x))}; }

// Numbers that fit 16 bits, sign included.
inline S pack(I low, I high) {
#if defined(__AVX512BW__)
    return (S)_mm512_packs_epi32((__m512i)low, (__m512i)high);
#elif defined(__AVX2__)
    return (S)_mm256_packs_epi32((__m256i)low, (__m256i)high);
#else
    return (S){short(low[0]), short(low[1]), short(low[2]), short(low[3]),
               short(high[0]), short(high[1]), short(high[2]), short(high[3])};
#endif
}

// Eight numbers from each of the addresses that lie `pitch` numbers apart, and back.
inline S load_eights(const std::uint16_t *from, long pitch) {
#if defined(__AVX2__)
    auto eight = [=](int i) { return load<__m128i>(from + i * pitch); };
#endif
#if defined(__AVX512BW__)
    __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(eight(0)), eight(1), 1);
    return (S)_mm512_inserti32x4(_mm512_inserti32x4(x, eight(2), 2), eight(3), 3);
#elif defined(__AVX2__)
    return (S)_mm256_inserti128_si256(_mm256_castsi128_si256(eight(0)), eight(1), 1);
#else
    return load<S>(from);
#endif
}
inline void store_eights(std::uint16_t *to, long pitch, S x) {
    for (int i = 0; i < W / 4; i++) std::memcpy(to + i * pitch, (char *)&x + 16 * i, 16);
}

// Rounded to bf16, for 0, sizes of 2**-126 to 2**100, and smaller ones that are bf16 already: next to 1.5 * 2**16 times
// its power of two, a number has room for as many bits as bf16 has.
inline F rounded_to_bf16(F x) {
    F power = floats(bits(x) & 0x7F800000);
    return exact_product_sum(power, all(-98304.0f), exact_product_sum(power, all(98304.0f), x));
}

// The bits of fp16 (HALF) or bf16.
template <bool HALF> inline S narrow(Wide x) {
    auto narrowed = [](F x) { return HALF ? (to_fp16(x) << 16) >> 16 : bits(rounded_to_bf16(x)) >> 16; };
    return pack(narrowed(x.low), narrowed(x.high));
}

// Numbers clamped to 0..255: in each 16 bytes, eight of `a` and eight of `b`.
inline Q clamped_bytes(S a, S b) {
#if defined(__AVX512BW__)
    return (Q)_mm512_packus_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Q)_mm256_packus_epi16((__m256i)a, (__m256i)b);
#else
    auto clamped = [](S x) { return least(most(x, S{}), S{} + 255); };
    const Q low{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle((Q)clamped(a), (Q)clamped(b), low);
#endif
}

// The sum of both bytes of each number.
inline S sums_of_bytes(Q x) {
#if defined(__AVX512BW__)
    return (S)_mm512_maddubs_epi16((__m512i)x, (__m512i)(Q{} + 1));
#elif defined(__AVX2__)
    return (S)_mm256_maddubs_epi16((__m256i)x, (__m256i)(Q{} + 1));
#else
    return ((S)x & 255) + (((S)x >> 8) & 255);
#endif
}

// In each lane, low a * low b + high a * high b.
inline I dot(S a, S b) {
#if defined(__AVX512BW__)
    return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    auto low = [](S x) { return ((I)x << 16) >> 16; };
    auto high = [](S x) { return (I)x >> 16; };
    return low(a) * low(b) + high(a) * high(b);
#endif
}

// Numbers of 0..255 out of bytes, and as bytes.
inline S load_bytes(const void *at) {
    Bytes x = load<Bytes>(at);
#if defined(__AVX512BW__)
    return (S)_mm512_cvtepu8_epi16((__m256i)x);
#elif defined(__AVX2__)
    return (S)_mm256_cvtepu8_epi16((__m128i)x);
#else
    return __builtin_convertvector(x, S);
#endif
}

// The bytes that `clamped_bytes` made of two rows.
template <int... i> inline void store_rows(void *first, void *second, Q rows, std::integer_sequence<int, i...>) {
    typedef std::int64_t Eights __attribute__((vector_size(4 * W)));
    Eights apart = __builtin_shuffle((Eights)rows, Eights{(i % (W / 4) * 2 + i / (W / 4))...});
    std::memcpy(first, &apart, 2 * W);
    std::memcpy(second, (char *)&apart + 2 * W, 2 * W);
}
inline void store_rows(void *first, void *second, Q rows) {
    store_rows(first, second, rows, std::make_integer_sequence<int, W / 2>());
}

inline void store_bytes(void *at, S x) {
#if defined(__AVX512BW__)
    store(at, _mm512_cvtepi16_epi8((__m512i)x));
#elif defined(__AVX2__)
    store(at, _mm_packus_epi16(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1)));
#else
    store(at, __builtin_convertvector(x, Bytes));
#endif
}

// rows[i][j] becomes rows[j][i], of eight rows, in each 16 bytes: an interleaving moves one bit of the numbers of rows
// to those of columns.
inline void transpose(S *rows) {
    for (int bit = 0; bit < 3; bit++) {
        S from[8];
        for (int i = 0; i < 8; i++) from[i] = rows[i];
        for (int i = 0; i < 4; i++) {
            rows[2 * i] = interleave_low(from[i], from[i + 4]);
            rows[2 * i + 1] = interleave_high(from[i], from[i + 4]);
        }
    }
}

}  // namespace lanes
