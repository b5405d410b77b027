// All layers in one op. With few rows, calling two ops for each layer would take a tenth of the time.
#pragma once
#include <type_traits>
#include <utility>

#include "tensors.h"

namespace fastenc {

// The arguments of the layers' ops that follow from a layer alone, of all layers in order, divided by type.
class FixedArguments {
 public:
  // tensors: an empty one stands for none. integers: booleans too. op: the op that was called, for the errors.
  FixedArguments(
      const char* op, const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
      const std::vector<double>& reals)
      : op_(op), tensors_(tensors), integers_(integers), reals_(reals) {}

  template <class T>
  T next() {
    if constexpr (std::is_same_v<T, Tensor>) {
      return next_of(tensors_, tensor_);
    } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
      const Tensor& given = next_of(tensors_, tensor_);
      return given.numel() ? std::optional<Tensor>(given) : std::nullopt;
    } else if constexpr (std::is_same_v<T, std::vector<Tensor>>) {
      return {next_of(tensors_, tensor_)};
    } else if constexpr (std::is_same_v<T, double>) {
      return next_of(reals_, real_);
    } else {
      static_assert(std::is_integral_v<T>);
      return static_cast<T>(next_of(integers_, integer_));
    }
  }

  void check_all_read() const {
    const bool all = tensor_ == tensors_.size() && integer_ == integers_.size() && real_ == reals_.size();
    STD_TORCH_CHECK(all, op_, ": more arguments than its layers have");
  }

 private:
  template <class T>
  const T& next_of(const std::vector<T>& values, size_t& position) {
    STD_TORCH_CHECK(position < values.size(), op_, ": fewer arguments than its layers have");
    return values[position++];
  }

  const char* op_;
  const std::vector<Tensor>& tensors_;
  const std::vector<int64_t>& integers_;
  const std::vector<double>& reals_;
  size_t tensor_ = 0, integer_ = 0, real_ = 0;
};

// op(given..., the next fixed arguments...).
template <class Result, class... All, class... Given>
Result call_with_fixed(Result (*op)(All...), FixedArguments& fixed, Given... given) {
  auto first = std::make_tuple(std::move(given)...);
  auto argument = [&]<size_t I>(std::integral_constant<size_t, I>) {
    if constexpr (I < sizeof...(Given))
      return std::get<I>(std::move(first));
    else
      return fixed.next<std::tuple_element_t<I, std::tuple<All...>>>();
  };
  return [&]<size_t... I>(std::index_sequence<I...>) {
    // In order, which a call's arguments are not.
    std::tuple<All...> arguments{argument(std::integral_constant<size_t, I>{})...};
    return std::apply(op, std::move(arguments));
  }(std::make_index_sequence<sizeof...(All)>{});
}

// The rows of x with these indices.
inline Tensor rows_of(const char* op, const Tensor& x, const Tensor& indices) {
  STD_TORCH_CHECK(
      indices.dim() == 1 && indices.is_contiguous() && indices.scalar_type() == ScalarType::Long, op,
      ": output_tokens must be contiguous int64 (tokens,)");
  const int64_t count = indices.size(0), rows = x.size(0), bytes = x.size(1) * (is_bfloat16(x) ? 2 : 4);
  Tensor taken = empty({count, x.size(1)}, x.scalar_type());
  const auto* index = static_cast<const int64_t*>(indices.const_data_ptr());
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(taken.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(index[i] >= 0 && index[i] < rows, op, ": output_tokens must be in [0, ", rows, ")");
    std::memcpy(to + i * bytes, from + index[i] * bytes, bytes);
  }
  return taken;
}

// A layer's table: `tables` has one for each layer, where an empty tensor stands for none, or no tensor.
inline std::optional<Tensor> table_of(const std::vector<Tensor>& tables, int64_t layer) {
  return tables.empty() || !tables[layer].numel() ? std::nullopt : std::optional<Tensor>(tables[layer]);
}

// Calls attend, an op of attention, and end, the op of a layer's rest, for each layer. Returns the state after each: the
// next layer's residual, and after the last layer its normalised output.
// output_tokens: the rows of which the last layer computes its rest, or none for all.
// relative_biases, rotaries: as table_of takes them.
template <class Attend, class End, class... Given>
std::vector<Tensor> run_layers(
    const char* op, Attend attend, End end, Tensor x, Tensor residual, const Tensor& cu_seqlens, int64_t max_seqlen,
    const std::vector<Tensor>& relative_biases, const std::vector<Tensor>& rotaries,
    const std::optional<Tensor>& output_tokens, int64_t layers,
    const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers, const std::vector<double>& reals,
    Given... given) {
  FixedArguments fixed(op, tensors, integers, reals);
  for (const auto* tables : {&relative_biases, &rotaries})
    STD_TORCH_CHECK(
        tables->empty() || static_cast<int64_t>(tables->size()) == layers, op, ": a table for each layer, or none");
  std::vector<Tensor> states;
  for (int64_t layer = 0; layer < layers; ++layer) {
    Tensor attended = call_with_fixed(
        attend, fixed, x, cu_seqlens, max_seqlen, table_of(relative_biases, layer), table_of(rotaries, layer),
        given...);
    if (output_tokens && layer + 1 == layers) {
      attended = rows_of(op, attended, *output_tokens);
      residual = rows_of(op, as_contiguous(residual), *output_tokens);
    }
    auto [y, next] = call_with_fixed(end, fixed, attended, residual, given...);
    residual = next.size(0) ? next : y;  // after a post-norm layer the residual is its output
    x = y;
    states.push_back(layer + 1 < layers ? residual : x);
  }
  fixed.check_all_read();
  return states;
}

}  // namespace fastenc
