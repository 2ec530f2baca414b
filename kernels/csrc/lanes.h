// Vectors of W numbers, as wide as the vector unit of the processor this is compiled for, and what the codecs do with
// them. Written with the compiler's own vector types, and with intrinsics where those compile badly (gcc 12 takes
// conversions to and from bytes apart into scalars, as it does any vector wider than the machine's).
//
// Must be compiled without contraction of products and sums and without fast-math: the order and rounding of the
// operations is the format.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lanes {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;  // NEON, SSE2
#endif
constexpr int ALIGNMENT = 64;  // of arrays that hold vectors, in bytes: no load then crosses a line of the cache

typedef float F __attribute__((vector_size(4 * W)));
typedef std::int32_t I __attribute__((vector_size(4 * W)));
typedef std::uint32_t U __attribute__((vector_size(4 * W)));
typedef std::uint16_t H __attribute__((vector_size(2 * W)));
typedef std::uint8_t B __attribute__((vector_size(W)));

inline F all(float x) { return x - F{}; }  // not x + F{}, which is an operation: it makes 0 of -0
inline I bits(F x) { return (I)x; }
inline F floats(I x) { return (F)x; }
// The second number where one is NaN.
inline F least(F a, F b) {
#if defined(__AVX512BW__)
    return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}
inline F most(F a, F b) {
#if defined(__AVX512BW__)
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
inline I least(I a, I b) { return a < b ? a : b; }
inline I most(I a, I b) { return a > b ? a : b; }
inline F within(F x, float low, float high) { return least(most(x, all(low)), all(high)); }

template <typename T> inline T load(const void *at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <typename T> inline void store(void *at, T value) { std::memcpy(at, &value, sizeof value); }

// The first `count` lanes of `value`.
template <typename T> inline void store_some(void *at, T value, int count) {
    if (count == W) return store(at, value);
    std::memcpy(at, &value, sizeof value / W * count);
}

// The first `count` lanes, and 0 in the others.
template <typename T> inline T load_some(const void *at, int count) {
    if (count == W) return load<T>(at);
    T value{};
    std::memcpy(&value, at, sizeof value / W * count);
    return value;
}

inline I wide(H x) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (I)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, I);
#endif
}

inline I wide(B x) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (I)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)x));
#else
    return __builtin_convertvector(x, I);
#endif
}

// Numbers of 0..65535 and of 0..255 in fewer bits.
inline H halves(I x) {
#if defined(__AVX512BW__)
    return (H)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    __m256i y = (__m256i)x;
    return (H)_mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
#else
    return __builtin_convertvector(x, H);
#endif
}

inline B bytes(I x) {
#if defined(__AVX512BW__)
    return (B)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
    __m128i y = (__m128i)halves(x);
    return (B)_mm_cvtsi128_si64(_mm_packus_epi16(y, y));
#else
    return __builtin_convertvector(x, B);
#endif
}

inline F numbers(I x) { return __builtin_convertvector(x, F); }
inline I numbers(F x) { return __builtin_convertvector(x, I); }  // whole ones, or towards zero

// To the nearest whole number, ties to even: exact for what is smaller than 2**22, as everything rounded here is.
inline F whole(F x) {
    constexpr float magic = 12582912.0f;
    return (x + magic) - magic;
}

// The same as integers.
inline I nearest(F x) {
#if defined(__AVX512BW__)
    return (I)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (I)_mm256_cvtps_epi32((__m256)x);
#else
    return numbers(whole(x));
#endif
}

// a * b + c where the product is exact, so that it does not matter whether it is rounded before the sum.
inline F exact_product_sum(F a, F b, F c) {
#if defined(__AVX512BW__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline F power_of_two(I exponent) { return floats((exponent + 127) << 23); }

// fp32 out of the bits of fp16 (HALF) or bf16; infinity and NaN keep an exponent beyond all bounds.
template <bool HALF> inline F widen(I u) {
    if constexpr (!HALF) return floats(u << 16);
    F scaled = floats((u & 0x7FFF) << 13) * 0x1p112f;  // 2**112 rebiases the exponent, subnormal numbers included
    I beyond = (u & 0x7C00) == 0x7C00;
    return floats(bits(scaled) | (beyond & 0x7F800000) | ((u & 0x8000) << 16));
}
template <bool HALF> inline F widen(H x) { return widen<HALF>(wide(x)); }

// Rounded to bf16, still fp32.
inline F to_bf16(F x) {
    I u = bits(x);
    return floats((u + 0x7FFF + ((u >> 16) & 1)) & -0x10000);
}

// The bits of fp16 (clamped to +-65504) to nearest, ties to even. NaN gives anything.
inline I to_fp16(F x) {
    I sign = (bits(x) >> 16) & 0x8000;
    F size = least(floats(bits(x) & 0x7FFFFFFF), all(65504.0f));
    I u = bits(size);
    F normal = floats((u + 0xFFF + ((u >> 13) & 1)) & -0x2000);
    F rounded = size < all(0x1p-14f) ? (size + 0.5f) - 0.5f : normal;
    return (bits(rounded * 0x1p-112f) >> 13) | sign;
}

// The bits of fp16 (HALF) or bf16.
template <bool HALF> inline H narrow(F x) { return halves(HALF ? to_fp16(x) : (I)((U)to_bf16(x) >> 16)); }

// The largest lane.
inline std::int32_t largest(I x) {
    std::int32_t most = x[0];
    for (int i = 1; i < W; i++) most = std::max(most, x[i]);
    return most;
}

// Calls `one(item)` for each item, on so many threads; false if any call was.
template <typename One> int each(long items, int threads, One one) {
    threads = int(std::min<long>(threads, items));
    std::vector<char> good(std::max(threads, 1), 1);
    auto run = [&](int part) {
        bool fine = true;
        for (long item = items * part / threads; item < items * (part + 1) / threads; item++) fine &= one(item);
        good[part] = fine;
    };
    std::vector<std::thread> others;
    for (int part = 1; part < threads; part++) others.emplace_back(run, part);
    if (threads > 0) run(0);
    for (auto &thread : others) thread.join();
    return std::all_of(good.begin(), good.end(), [](char fine) { return fine != 0; });
}

}  // namespace lanes
