// Runs an ONNX file of `palm-ds convert --to onnx` on texts given as ids, with ONNX Runtime's C API.
//
//   run_onnx MODEL OUTPUT ID ID ID [, ID ID ...]     one text, or several of any length
//
// Prints a line for each text: the numbers of OUTPUT (logits, sentence_embedding, ...). The texts are
// padded to the longest; token_type_ids, task_type_ids and the mask of words are made as needed.

#include <onnxruntime_c_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

const OrtApi* api = OrtGetApiBase()->GetApi(ORT_API_VERSION);

void check(OrtStatus* status) {
    if (status == nullptr) return;
    std::fprintf(stderr, "error: %s\n", api->GetErrorMessage(status));
    api->ReleaseStatus(status);
    std::exit(2);
}

// The texts after the first two arguments, separated by commas.
std::vector<std::vector<int64_t>> read_texts(int count, char** arguments) {
    std::vector<std::vector<int64_t>> texts(1);
    for (int i = 3; i < count; ++i) {
        if (std::strcmp(arguments[i], ",") == 0) {
            texts.emplace_back();
            continue;
        }
        char* end = nullptr;
        texts.back().push_back(std::strtoll(arguments[i], &end, 10));
        if (*end != '\0') {
            std::fprintf(stderr, "error: %s is not an id\n", arguments[i]);
            std::exit(2);
        }
    }
    return texts;
}

// The values of an input, (texts, length), by its name.
std::vector<int64_t> values_of(const std::string& name,
                               const std::vector<std::vector<int64_t>>& texts, size_t length) {
    std::vector<int64_t> values(texts.size() * length, 0);
    if (name != "input_ids" && name != "attention_mask" && name != "word_mask") return values;
    for (size_t row = 0; row < texts.size(); ++row)
        for (size_t at = 0; at < texts[row].size(); ++at) {
            const bool special = at == 0 || at + 1 == texts[row].size();
            const int64_t mark = name == "word_mask" && special ? 0 : 1;
            values[row * length + at] = name == "input_ids" ? texts[row][at] : mark;
        }
    return values;
}

std::vector<std::string> input_names(OrtSession* session) {
    OrtAllocator* allocator = nullptr;
    check(api->GetAllocatorWithDefaultOptions(&allocator));
    size_t count = 0;
    check(api->SessionGetInputCount(session, &count));
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) {
        char* name = nullptr;
        check(api->SessionGetInputName(session, i, allocator, &name));
        names.emplace_back(name);
        check(api->AllocatorFree(allocator, name));
    }
    return names;
}

// Prints a line of numbers for each text.
template <typename T>
void print(const T* data, size_t texts, size_t numbers) {
    for (size_t row = 0; row < texts; ++row)
        for (size_t i = 0; i < numbers; ++i)
            std::printf("%.9g%c", static_cast<double>(data[row * numbers + i]),
                        i + 1 == numbers ? '\n' : ' ');
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 4) {
        std::fprintf(stderr, "usage: %s MODEL OUTPUT ID ID ID [, ID ID ...]\n", arguments[0]);
        return 2;
    }
    if (api == nullptr) {
        std::fprintf(stderr, "error: this ONNX Runtime is older than the header\n");
        return 2;
    }
    const auto texts = read_texts(count, arguments);
    size_t length = 1;
    for (const auto& text : texts) length = std::max(length, text.size());

    OrtEnv* env = nullptr;
    OrtSessionOptions* options = nullptr;
    OrtSession* session = nullptr;
    OrtMemoryInfo* memory = nullptr;
    check(api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "run_onnx", &env));
    check(api->CreateSessionOptions(&options));
    check(api->CreateSession(env, arguments[1], options, &session));
    check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));

    const auto names = input_names(session);
    const int64_t shape[] = {static_cast<int64_t>(texts.size()), static_cast<int64_t>(length)};
    std::vector<std::vector<int64_t>> values;
    std::vector<OrtValue*> inputs(names.size(), nullptr);
    std::vector<const char*> plain;
    for (const auto& name : names) {
        values.push_back(values_of(name, texts, length));
        plain.push_back(name.c_str());
    }
    for (size_t i = 0; i < names.size(); ++i)
        check(api->CreateTensorWithDataAsOrtValue(
            memory, values[i].data(), values[i].size() * sizeof(int64_t), shape, 2,
            ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &inputs[i]));

    const char* output = arguments[2];
    OrtValue* result = nullptr;
    check(api->Run(session, nullptr, plain.data(), inputs.data(), inputs.size(), &output, 1,
                   &result));

    OrtTensorTypeAndShapeInfo* about = nullptr;
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    size_t elements = 0;
    void* data = nullptr;
    check(api->GetTensorTypeAndShape(result, &about));
    check(api->GetTensorElementType(about, &type));
    check(api->GetTensorShapeElementCount(about, &elements));
    check(api->GetTensorMutableData(result, &data));
    const size_t numbers = elements / texts.size();
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
        print(static_cast<const int64_t*>(data), texts.size(), numbers);
    else
        print(static_cast<const float*>(data), texts.size(), numbers);

    api->ReleaseTensorTypeAndShapeInfo(about);
    api->ReleaseValue(result);
    for (OrtValue* input : inputs) api->ReleaseValue(input);
    api->ReleaseMemoryInfo(memory);
    api->ReleaseSession(session);
    api->ReleaseSessionOptions(options);
    api->ReleaseEnv(env);
    return 0;
}
