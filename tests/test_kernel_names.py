"""Short kernel names, from names that torch 2.11 and 2.13, cuBLAS, CUTLASS, Triton and CUB have."""

import pytest

from moetail.bench.kernel_names import short_name

LAMBDA = "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const"
NAMES = {
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul>>(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)":
        "vectorized_elementwise_kernel<CUDAFunctor_add>",
    f"void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda({LAMBDA}, "
    "std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>>(int, ...)":
        "unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&, "
    "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> > const&)"
    "::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<...>)": "elementwise_kernel<MulFunctor>",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
    "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, "
    "unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::func_wrapper_t<...> >)":
        "reduce_kernel<sum_functor>",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::MeanOps<c10::BFloat16, "
    "float, float, c10::BFloat16>, unsigned int, c10::BFloat16, 4, 4> >(...)": "reduce_kernel<MeanOps>",
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl"
    "<at::native::OpaqueType<2> >(at::TensorIteratorBase&, c10::ArrayRef<long>, c10::ArrayRef<long>)"
    "::{lambda(char*, char const*, long)#1}>(...)::{lambda(int)#1}>(long, ...)":
        "index_elementwise_kernel<index_kernel_impl>",
    "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&, "
    "at::Tensor&)::{lambda()#1}::operator()() const::{lambda(long)#1}>(int, ...)":
        "elementwise_kernel_with_index<arange_cuda_out>",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
    "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, cutlass::gemm::collective::CollectiveMma<int>>>>"
    "(at::cuda::detail::enable_3x_kernel_for_sm9x<...>::Params)": "cutlass::device_kernel<GemmUniversal>",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>(cutlass_80::Params)":
        "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)":
        "vectorized_layer_norm_kernel",
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, 5>(cublasGemv<...>)":
        "gemvx::kernel",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::Policy1000, false>(int*, int)":
        "at_cuda_detail::cub::DeviceRadixSortOnesweepKernel",
    "void vllm::moe::topkGatingSoftmax<8, 64>(float const*)": "vllm::moe::topkGatingSoftmax",
    "compute_grouped_offsets(int const*, long*, unsigned int)": "compute_grouped_offsets",
    "nvjet_tst_128x64_64x6_1x2_h_bz_TNT": "nvjet_tst_128x64_64x6_1x2_h_bz_TNT",
    "_finalize_kernel": "_finalize_kernel",
    "triton_poi_fused_add_0": "triton_poi_fused_add_0",
    "_ZN7cutlass13device_kernelIiEEvT_": "_ZN7cutlass13device_kernelIiEEvT_",
    "Memcpy DtoD (Device -> Device)": "Memcpy DtoD (Device -> Device)",
    "Memset (Device)": "Memset (Device)",
}  # fmt: skip


@pytest.mark.parametrize(("full", "short"), NAMES.items(), ids=NAMES.values())
def test_short_name(full, short):
    assert short_name(full) == short


def test_a_generic_launcher_of_values_only_keeps_its_name():
    assert short_name("void reduce_kernel<512, float, (bool)1>(int)") == "reduce_kernel"


@pytest.mark.parametrize("odd", ["", "<", ">>>", "a<b", "void f(", "x -> y", "operator()(int)", "Kernel<>()", "(a) b"])
def test_any_text_has_a_name(odd):
    assert short_name(odd) or not odd
