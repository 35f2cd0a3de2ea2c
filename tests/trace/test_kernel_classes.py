"""Names of many libraries' kernels, parameters and template arguments shortened.

The H200 names, gloo's and aten's are from recorded traces, most others from the libraries' sources and published
profiles. The peer copies other than CUDA's, and template arguments that mention what they are not, are made up.
"""

import pytest

from overlap_sweep.trace.kernel_classes import classify, function_name

GEMM = [
    ("cublas", "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN"),
    ("cublas", "nvjet_hsh_256x128_64x4_2x1_v_bz_coopB_TNT"),
    ("cublas", "nvjet_tst_256x160_64x4_1x2_h_bz_coopA_TNT"),
    ("cublas", "nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT"),
    ("cublas", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off"),
    ("cublas", "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x64x32_stage4_warpsize2x2x1_tensor16x8x16_kernel"),
    ("cublas", "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn"),
    ("cublas", "ampere_sgemm_32x32_sliced1x4_tn"),
    ("cublas", "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn"),
    ("cublas", "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn"),
    ("cublas", "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true, cublasGemvTensor<float const> >(x)"),
    ("cublas", "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128>(cublasGemv)"),
    ("cublas", "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParamsEx<int> >(float)"),
    (
        "cublas",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, false, true, "
        "false, 7, false, cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<__nv_bfloat16 const> > >(int)",
    ),
    ("cublas", "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, true, false>(int)"),
    ("cublas", "void splitKreduce_kernel<32, 16, int, __half, __half, __half, __half, true, false>(int, int)"),
    ("cutlass", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)"),
    ("cutlass", "void cutlass::Kernel<cutlass_75_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_nn_align8>(Params)"),
    ("cutlass", "void cutlass__5x_cublas::Kernel<cutlass_75_tensorop_f16_s1688gemm_f16_256x64_nn_align1>(Params)"),
    ("cutlass", "cutlass_80_tensorop_d884gemm_64x64_16x4_nt_align1"),
    ("cutlass", "cutlass3x_sm100_bstensorop_s256x256x64gemm_block_scaled_ue4m3xf4_f32"),
    ("cutlass", "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int> > >(x)"),
    ("cutlass", "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEEEEEEvNT_6ParamsE"),
    ("cutlass", "void cutlass::Kernel<cutlass::reduction::kernel::ReduceSplitK<cutlass::Shape<4, 128> > >(Params)"),
    ("tensile", "Cijk_Ailk_Bljk_SB_MT128x128x16_MI32x32x2x1_SN_1LDSB0_APM1_ABV0_ACED0"),
    ("tensile", "Custom_Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x1"),
    ("hipblaslt", "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB0_AFC1"),
    ("hipblaslt", "Cijk_Alik_Bljk_F8BS_BH_Bias_HA_S_SAB_SAV_UserArgs_MT64x64x512_MI16x16x1.kd"),
    ("ck", "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<ck::bhalf_t>, true>(Argument)"),
    ("ck", "_ZN2ck40kernel_gemm_xdl_cshuffle_v3_multi_d_b_preshuffleINS_8GridwiseEEEvT_"),
    ("ck", "void ck_tile::kentry<1, ck_tile::GroupedGemmKernel<ck_tile::GemmSpatiallyLocalTilePartitioner<int> > >(x)"),
    ("ck", "void ck_tile::kentry<256, 1, ck_tile::MoeFlatmmKernel<ck_tile::Swiglu> >(x)"),
    ("triton", "triton_mm_12"),
    ("triton", "triton_mm_plus_mm_3"),
    ("triton", "triton_tem_fused_mm_0"),
    ("triton", "triton_tem_fused_addmm_relu_0"),
    ("triton", "triton_tem_fused__unsafe_view_gelu_mm_mul_t_view_28"),
    ("triton", "triton_tem_fused__scaled_mm_0"),
    ("triton", "triton_tem_fused_bmm_clone_mm_t_transpose_view_24"),
    ("triton", "matmul_kernel"),
    ("triton", "matmul_kernel_persistent"),
    ("triton", "_w8a8_block_fp8_matmul"),
    ("triton", "_geglu_mm_kernel"),
    ("triton", "fused_moe_kernel"),
    ("rocblas", "void rocblas_gemvt_sn_kernel<false, 256, 4, int, float const*, float>(int)"),
    ("aiter", "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int)"),
    ("other", "_ZN5aiter36bf16gemm_bf16_tn_256x256_bpreshuffleE"),
    ("other", "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 2112u, 7168u, 1u, 128u, 128u>(float*, int*)"),
    ("other", "void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>(int, int, int)"),
    ("marlin", "void marlin::Marlin<__nv_bfloat16, 1125899906843648l, 256, 4, 16, 4, true, 4, 8, false>(int4 const*)"),
]

COMMUNICATION = [
    ("nccl", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ("nccl", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    ("nccl", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
    ("nccl", "ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevComm*, unsigned long, ncclWork*)"),
    ("nccl", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"),
    ("nccl", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"),
    ("nccl", "void ncclAllReduceRingLLKernel_sum_f32(ncclColl)"),
    ("nccl", "ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)"),
    ("nccl", "ncclSymDevKernel_ReduceScatter_LD_sum_bf16(ncclSymDevArgs)"),
    ("nccl", "_Z37ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE"),
    ("rccl", "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"),
    ("rccl", "rcclGenericKernel(ncclDevComm*, channelMasks, ncclWork*)"),
    ("rccl", "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)"),
    ("userbuffers", "void userbuffers_fp16_sum_inplace_gpu_rr_rs<4>(int, int, int, void**, int, unsigned long)"),
    ("userbuffers", "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<4>(int, int, int, void**, int, void*)"),
    ("userbuffers", "void userbuffers_fp16_sum_inplace_gpu_rw_ag<4>(int, int, int, void**, int, unsigned long)"),
    ("userbuffers", "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)"),
    ("userbuffers", "_Z21kuserbuffers_pushsendPiS_P4int4S1_i"),
    ("userbuffers", "kuserbuffers_pushsendrecv(int*, int*, int4*, int4*, int, int, int, int*, int*)"),
    ("symm_mem", "void c10d::symmetric_memory::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(long)"),
    ("symm_mem", "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(long)"),
    ("symm_mem", "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)"),
    ("symm_mem", "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*, unsigned long)"),
    ("symm_mem", "void c10d::intra_node_comm::oneShotAllReduceKernel<8u, false>(__nv_bfloat16*, unsigned long)"),
    ("nvshmem", "nvshmemi_proxy_rma_entrypoint_blocking(void*, int)"),
    ("nvshmem", "nvshmem_put_kernel"),
    ("deep_ep", "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*)"),
    ("deep_ep", "void deep_ep::internode_ll::combine<true, 7168, 9>(void*, void*, int*)"),
    ("custom", "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)"),
    ("custom", "_ZN5aiter26cross_device_reduce_2stageIDF16bLi8ELb0EEEv"),
    ("custom", "void flashinfer::trtllm_allreduce::allreduce_fusion_kernel_oneshot_lamport<1, __nv_bfloat16>(Params)"),
]

WAIT = [
    ("userbuffers", "kuserbuffers_pushrecv(int, int, int, int, int*, int*, int, unsigned long, int*, int*)"),
    ("userbuffers", "void kuserbuffers_pushrecv<true>(int, int)"),
    ("userbuffers", "_Z21kuserbuffers_pushrecviiiiPiS_imS_S_"),
    ("userbuffers", "_ZN18transformer_engine12_GLOBAL__N_121kuserbuffers_pushrecvEiiiiPiS1_imS1_S1_"),
    ("userbuffers", "tiny_delay_kern()"),
    ("userbuffers", "consumer_kernel(void*, int)"),
    ("symm_mem", "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"),
    ("symm_mem", "c10d::symmetric_memory::(anonymous namespace)::wait_signal_kernel(unsigned int**, int, int)"),
    ("nvshmem", "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)"),
    ("nvshmem", "nvshmemi_signal_wait_until_on_stream_kernel(unsigned long volatile*, int, unsigned long)"),
    ("nvshmem", "nvshmemi_proxy_quiet_entrypoint"),
    ("flux", "bytedance::flux::wait_geq_kernel(unsigned long long const*, unsigned long long)"),
    ("deep_ep", "void deep_ep::intranode::barrier<8>(int**, int)"),
]

COMPUTE = [
    ("attention", "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int> > >(x)"),
    ("attention", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_traits<128, 64, cutlass::bfloat16_t> >(x)"),
    ("attention", "void flash::flash_fwd_splitkv_combine_kernel<Flash_traits<128, cutlass::half_t>, 4>(x)"),
    ("attention", "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(AttentionKernel<cutlass::bfloat16_t>::Params)"),
    ("attention", "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaFwdKernelTmaWarpspecialized<int> >(x)"),
    ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_kernel0_0"),
    ("attention", "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90EEEEEvNT_6ParamsE"),
    ("attention", "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockGemmARegBReg> >(x)"),
    ("attention", "_attn_fwd"),
    ("attention", "aiter::mla_dec_stage1_bf16_a16w16_subQ16_mqa16"),
    ("aten", "void at::native::vectorized_elementwise_kernel<4, at::native::cutlass_gemm_nccl_functor>(x)"),
    (
        "aten",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::"
        "operator()() const::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>(int, at::gemm_args)",
    ),
    ("aten", "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, matmul_norm_all_reduce> >(x)"),
    ("aten", "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"),
    ("transformer_engine", "void transformer_engine::gated_act_kernel<16, true, float, Empty>(int)"),
    ("transformer_engine", "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Traits<8192u> >(x)"),
    ("other", "void (anonymous namespace)::elementwise_kernel_with_index<int, arange_cuda_out(c10::Scalar)>(x)"),
    ("other", "void reduce_bf16_cuda<32>(void*, void*, int, int, int, int)"),
    ("other", "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, float>(cutlass::bfloat16_t*)"),
    ("other", "void gptq_marlin_repack_kernel<256, 4, false>(unsigned int const*)"),
    ("other", "void ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<ck_tile::Rmsnorm2dFwdPipelineOnePass<int> > >(x)"),
    ("other", "void fbgemm_gpu::split_embedding_codegen_forward_unweighted_kernel<float, float>(x)"),
    ("other", "_ZN10fbgemm_gpu24jagged_dense_elementwiseIfEEvT_"),
    ("other", "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)"),
    ("other", "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)"),
    ("other", "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(c10::BFloat16*)"),
    ("triton", "triton_poi_fused_addmm_relu_0"),
    ("triton", "triton_red_fused_mm_0"),
    ("triton", "triton_per_fused_addmm_mean_relu_sub_1"),
    ("triton", "triton_poi_fused__to_copy_all_gather_into_tensor_wait_tensor_3"),
    ("triton", "triton_tem_fused_flex_attention_0"),
    ("triton", "triton_tem_fused_convolution_2"),
]

OTHER_EVENTS = [
    ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", "comm", "peer_copy"),
    ("gpu_memcpy", "MEMORY_COPY_PEER_TO_PEER", "comm", "peer_copy"),
    ("gpu_memcpy", "hipMemcpyPeerAsync", "comm", "peer_copy"),
    ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "memory", "copy"),
    ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "memory", "copy"),
    ("gpu_memset", "Memset (Device)", "memory", "copy"),
    ("kernel", "__amd_rocclr_copyBuffer.kd", "memory", "copy"),
    ("kernel", "__amd_rocclr_fillBufferAligned", "memory", "copy"),
    ("user_annotation", "gloo:all_gather", "comm", "gloo"),
    ("user_annotation", "gloo:recv", "comm", "gloo"),
    ("user_annotation", "gloo:barrier", "wait", "gloo"),
    ("user_annotation", "Optimizer.step#AdamW.step", "ignore", "other"),
    ("user_annotation", "ProfilerStep#3", "ignore", "other"),
    ("user_annotation", "nccl:_all_gather_base", "ignore", "other"),
    ("cpu_op", "c10d::_allgather_base_", "ignore", "other"),
    ("cpu_op", "AddmmBackward0", "ignore", "other"),
    ("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", "ignore", "other"),
    ("cpu_op", "record_param_comms", "ignore", "other"),
    ("cpu_op", "aten::view", "ignore", "aten"),
    ("cpu_op", "aten::empty_strided", "ignore", "aten"),
    ("cpu_op", "aten::resolve_conj", "ignore", "aten"),
    ("cpu_op", "aten::copy_", "memory", "aten"),
    ("cpu_op", "aten::clone", "memory", "aten"),
    ("cpu_op", "aten::mm", "gemm", "aten"),
    ("cpu_op", "aten::addmm", "gemm", "aten"),
    ("cpu_op", "aten::bmm", "gemm", "aten"),
    ("cpu_op", "aten::baddbmm", "gemm", "aten"),
    ("cpu_op", "aten::linear", "gemm", "aten"),
    ("cpu_op", "aten::matmul", "gemm", "aten"),
    ("cpu_op", "aten::_scaled_mm", "gemm", "aten"),
    ("cpu_op", "mkldnn::_linear_pointwise", "gemm", "onednn"),
    ("cpu_op", "aten::gelu", "compute", "aten"),
    ("cpu_op", "aten::native_layer_norm", "compute", "aten"),
    ("cpu_op", "aten::addcmul_", "compute", "aten"),
    ("cpu_op", "aten::embedding", "compute", "aten"),
    ("cpu_op", "graph_0_cpp_fused_add_0", "compute", "inductor"),
]

KERNELS = [
    ("kernel", name, kind, library)
    for kind, names in (("gemm", GEMM), ("comm", COMMUNICATION), ("wait", WAIT), ("compute", COMPUTE))
    for library, name in names
]


@pytest.mark.parametrize(("category", "name", "kind", "library"), KERNELS + OTHER_EVENTS)
def test_class_of(category: str, name: str, kind: str, library: str) -> None:
    assert classify(category, name) == (kind, library)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_gemm>(Params)", "cutlass::Kernel2"),
        ("void (anonymous namespace)::fill<int, f(int)::{lambda()#1}>(int)", "anonymous::fill"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<g<int> >(int)", "internal::gemvx::kernel"),
        ("void scale<8, &(float silu<float, float>(float, Empty const&))>(float*)", "scale"),
        ("void at::native::cut_off<at::native::in_the<middle, of", "at::native::cut_off"),
        ("_Z21kuserbuffers_pushrecviiiiPiS_", "kuserbuffers_pushrecv"),
        ("_ZN2at6native12_GLOBAL__N_16kernelIfEEvT_", "at::native::anonymous::kernel"),
        ("_ZN12_GLOBAL__N_111elementwiseEi", "anonymous::elementwise"),
        ("triton_poi_fused_0", "triton_poi_fused_0"),
        ("", ""),
    ],
)
def test_function_name(kernel: str, function: str) -> None:
    assert function_name(kernel) == function
