// The five products as CuTe tiled MMAs, and the shared-memory layouts they read. Types only.
//
//   S^T  = K Q^T    (kv, q)   both from shared memory
//   dP^T = V dO^T   (kv, q)   both from shared memory
//   dV  += P^T dO   (kv, dv)  P^T from registers: the fragment of S^T is the operand fragment
//   dK  += dS^T Q   (kv, d)   dS^T from registers
//   dQ   = dS K     (q, d)    dS from shared memory: it needs the rows of both warpgroups
//
// d is the head dimension of q and k, dv that of v. Each warpgroup owns 64 rows of kv. dQ is split
// between the warpgroups by columns, 64 or (d = 192) 96 each, or by rows for head dimension 64.
#pragma once

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "config.h"

namespace dash {

template <typename Element, typename Config>
struct Products {
  using TileQ = cute::Int<Config::kTileQ>;
  using TileKv = cute::Int<Config::kTileKv>;
  using HeadDim = cute::Int<Config::kHeadDim>;
  using HeadDimV = cute::Int<Config::kHeadDimV>;
  using Stages = cute::Int<Config::kStages>;
  using DsStages = cute::Int<Config::kDsStages>;
  using Warpgroups = cute::Int<Config::kMmaWarpgroups>;

  static constexpr auto kK = cute::GMMA::Major::K;
  static constexpr auto kMn = cute::GMMA::Major::MN;

  // As TMA writes them: head dimension contiguous, blocks of 64 columns, 128-byte swizzle. A block
  // of K is as wide as its boxes: dQ's halves of 96 columns do not begin at a 64th.
  using RowAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using KAtom = cute::conditional_t<Config::kKBoxColumns == 64, RowAtom,
                                    cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using KLayout = decltype(cute::tile_to_shape(KAtom{}, cute::Shape<TileKv, HeadDim>{}));
  using VLayout = decltype(cute::tile_to_shape(RowAtom{}, cute::Shape<TileKv, HeadDimV>{}));
  template <typename Columns>
  using Rows = decltype(cute::tile_to_shape(RowAtom{}, cute::Shape<TileQ, Columns, Stages>{}));
  using QLayout = Rows<HeadDim>;
  using DoutLayout = Rows<HeadDimV>;

  // The same bytes read across: (head dimension, rows).
  using KTransposed = decltype(cute::composition(
      KLayout{}, cute::Layout<cute::Shape<HeadDim, TileKv>, cute::Stride<TileKv, cute::_1>>{}));
  template <typename Columns>
  using Transposed = decltype(cute::composition(
      Rows<Columns>{},
      cute::Layout<cute::Shape<Columns, TileQ, Stages>,
                   cute::Stride<TileQ, cute::_1, cute::Int<Config::kTileQ * Columns::value>>>{}));
  using QTransposed = Transposed<HeadDim>;
  using DoutTransposed = Transposed<HeadDimV>;

  // dS is (q, kv) with q contiguous: stmatrix stores the fragment of dS^T without transposing.
  using DsAtom = cute::GMMA::Layout_MN_SW128_Atom<Element>;
  using DsLayout = decltype(cute::tile_to_shape(DsAtom{}, cute::Shape<TileQ, TileKv, DsStages>{}));

  using Scores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<TileKv, TileQ, HeadDim>, kK,
                                 kK>(),
      cute::Layout<cute::Shape<Warpgroups, cute::_1, cute::_1>>{}));
  template <typename Columns>
  using KvGradient = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<TileKv, Columns, TileQ>, kK,
                                 kMn>(),
      cute::Layout<cute::Shape<Warpgroups, cute::_1, cute::_1>>{}));
  using KGradient = KvGradient<HeadDim>;
  using VGradient = KvGradient<HeadDimV>;
  using DqColumns = cute::Int<Config::kHeadDim / (Config::kDqByColumns ? 2 : 1)>;
  using DqSplit =
      cute::conditional_t<Config::kDqByColumns, cute::Shape<cute::_1, Warpgroups, cute::_1>,
                          cute::Shape<Warpgroups, cute::_1, cute::_1>>;
  using QGradients = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, DqColumns, TileKv>,
                                 kMn, kMn>(),
      cute::Layout<DqSplit>{}));

  // Floats a thread holds of each accumulator.
  static constexpr int kScoreFragment = Config::kTileKv * Config::kTileQ / Config::kMmaThreads;
  static constexpr int kDkFragment = Config::kTileKv * Config::kHeadDim / Config::kMmaThreads;
  static constexpr int kDvFragment = Config::kTileKv * Config::kHeadDimV / Config::kMmaThreads;
  static constexpr int kDqFragment = Config::kDqFragment;

  static constexpr auto score_layout() {
    return cute::make_layout(cute::partition_shape_C(Scores{}, cute::Shape<TileKv, TileQ>{}));
  }
  static constexpr auto operand_layout() {  // P^T or dS^T in 16 bit
    return cute::make_layout(cute::partition_shape_A(KGradient{}, cute::Shape<TileKv, TileQ>{}));
  }
  static constexpr auto dk_layout() {
    return cute::make_layout(cute::partition_shape_C(KGradient{}, cute::Shape<TileKv, HeadDim>{}));
  }
  static constexpr auto dv_layout() {
    return cute::make_layout(cute::partition_shape_C(VGradient{}, cute::Shape<TileKv, HeadDimV>{}));
  }
  static constexpr auto dq_layout() {
    return cute::make_layout(cute::partition_shape_C(QGradients{}, cute::Shape<TileQ, HeadDim>{}));
  }
};

}  // namespace dash
