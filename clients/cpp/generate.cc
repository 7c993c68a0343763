// Streams one Generate, with the protos as they are and gRPC's default message limits.
//
//   LORIKEET_TOKEN=... lorikeet-generate --prompt "Once upon a time" [--adapter demo/pirate] [--max-tokens 50]
//
// Text goes to stdout as it comes. Ctrl-C, or --cancel-after N tokens, cancels the call: the server stops within two
// steps. Exit codes are the CLI's: 0 done, 1 failed, 2 usage, 3 not found, 4 unavailable, 5 not allowed, 6 out of
// time, 130 interrupted.

#include <grpcpp/grpcpp.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "lorikeet/inference/v1/inference_service.grpc.pb.h"

namespace inference = lorikeet::inference::v1;

namespace {

constexpr int kFailed = 1, kUsage = 2, kInterrupted = 130;

constexpr char kHelp[] =
    "usage: lorikeet-generate (--prompt TEXT | --chat TEXT) [--adapter NAME] [--max-tokens N] [--temperature T]\n"
    "                         [--timeout-s S] [--cancel-after N]\n"
    "LORIKEET_INFERENCE (127.0.0.1:50051) is the service's address, LORIKEET_TOKEN the tenant's token; with\n"
    "LORIKEET_TLS_CA_FILE it speaks TLS.";

struct Options {
  std::optional<std::string> prompt, chat, adapter;
  std::uint32_t max_tokens = 100;
  float temperature = 0;
  double timeout_s = 120;
  std::optional<std::uint32_t> cancel_after;
  bool help = false;
};

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Parses all of `text`; std::stoul and its like would take "5x" for 5, and "-1" for a huge number.
template <typename Number>
Number ParseNumber(const std::string& name, const std::string& text) {
  std::istringstream in(text);
  Number number;
  if (text.empty() || text[0] == '-' || !(in >> number) || !in.eof()) {
    throw UsageError("--" + name + ": '" + text + "' is not a number that it can take");
  }
  return number;
}

// Whether a header or a name can hold it: printable ASCII without spaces.
bool IsPrintable(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < '\x7f'; });
}

Options ParseOptions(int argc, char** argv) {
  static const std::set<std::string> kNames = {"prompt",      "chat",      "adapter",     "max-tokens",
                                               "temperature", "timeout-s", "cancel-after"};
  std::map<std::string, std::string> given;
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      options.help = true;
      return options;
    }
    if (flag.rfind("--", 0) != 0 || kNames.count(flag.substr(2)) == 0) throw UsageError("unknown option " + flag);
    if (i + 1 == argc) throw UsageError(flag + " needs a value");
    given[flag.substr(2)] = argv[i + 1];
  }
  const auto text = [&](const std::string& name) -> std::optional<std::string> {
    const auto found = given.find(name);
    return found == given.end() ? std::nullopt : std::optional(found->second);
  };
  options.prompt = text("prompt");
  options.chat = text("chat");
  options.adapter = text("adapter");
  if (options.adapter && !IsPrintable(*options.adapter)) {
    throw UsageError("--adapter: a name has neither spaces nor control characters, and is ASCII");
  }
  if (const auto v = text("max-tokens")) options.max_tokens = ParseNumber<std::uint32_t>("max-tokens", *v);
  if (const auto v = text("temperature")) options.temperature = ParseNumber<float>("temperature", *v);
  if (const auto v = text("timeout-s")) options.timeout_s = ParseNumber<double>("timeout-s", *v);
  if (const auto v = text("cancel-after")) options.cancel_after = ParseNumber<std::uint32_t>("cancel-after", *v);
  if (options.prompt.has_value() == options.chat.has_value()) throw UsageError("give one of --prompt and --chat");
  return options;
}

std::string Environment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

// The tenant's token; empty for none. gRPC would abort on one that no header can carry, and print it.
std::string Token() {
  const std::string token = Environment("LORIKEET_TOKEN", "");
  if (!IsPrintable(token)) {
    throw std::runtime_error(
        "LORIKEET_TOKEN has characters that a header cannot carry; copy it again without white space");
  }
  return token;
}

// TLS where LORIKEET_TLS_CA_FILE names an authority, plain text elsewhere.
std::shared_ptr<grpc::ChannelCredentials> Credentials() {
  const std::string ca_file = Environment("LORIKEET_TLS_CA_FILE", "");
  if (ca_file.empty()) return grpc::InsecureChannelCredentials();
  std::ifstream in(ca_file);
  if (!in) throw std::runtime_error("LORIKEET_TLS_CA_FILE: cannot read " + ca_file);
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs.assign(std::istreambuf_iterator<char>(in), {});
  return grpc::SslCredentials(tls);
}

std::shared_ptr<grpc::Channel> Connect() {
  grpc::ChannelArguments arguments;
  // Pings keep the connection through a long prefill, and show a dead one; the server takes them from 10 s up.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return grpc::CreateCustomChannel(Environment("LORIKEET_INFERENCE", "127.0.0.1:50051"), Credentials(), arguments);
}

inference::GenerateRequest Request(const Options& options) {
  inference::GenerateRequest request;
  if (options.prompt) {
    request.set_prompt(*options.prompt);
  } else {
    auto* message = request.mutable_chat()->add_messages();
    message->set_role("user");
    message->set_content(*options.chat);
  }
  // Unset is the base model; an empty name would be an error.
  if (options.adapter) request.set_adapter(*options.adapter);
  request.mutable_sampling()->set_temperature(options.temperature);
  request.mutable_sampling()->set_max_tokens(options.max_tokens);
  return request;
}

int ExitCode(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::NOT_FOUND: return 3;
    case grpc::StatusCode::UNAVAILABLE: return 4;
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED: return 5;
    case grpc::StatusCode::DEADLINE_EXCEEDED: return 6;
    default: return kFailed;
  }
}

// Cancels a call on Ctrl-C, from a thread: TryCancel must not be called by a signal handler. Made before any other
// thread, so that all of them leave SIGINT to this one.
class Interrupt {
 public:
  Interrupt() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  }
  void Watch(grpc::ClientContext& context) {
    watcher_ = std::thread([this, &context] {
      const timespec pause = {0, 50'000'000};
      while (!is_over_) {
        if (sigtimedwait(&signals_, nullptr, &pause) == SIGINT) {
          was_interrupted = true;
          context.TryCancel();
        }
      }
    });
  }
  void Stop() {
    is_over_ = true;
    if (watcher_.joinable()) watcher_.join();
  }
  ~Interrupt() { Stop(); }
  std::atomic<bool> was_interrupted = false;

 private:
  sigset_t signals_;
  std::atomic<bool> is_over_ = false;
  std::thread watcher_;
};

int Stream(const Options& options, Interrupt& interrupt) {
  const auto stub = inference::InferenceService::NewStub(Connect());
  grpc::ClientContext context;
  const std::string token = Token();
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(static_cast<long long>(std::min(options.timeout_s, 1e9) * 1000)));
  interrupt.Watch(context);

  const auto reader = stub->Generate(&context, Request(options));
  inference::GenerateResponse piece;
  std::optional<inference::Finish> finish;
  std::uint32_t num_tokens = 0;
  bool was_enough = false;
  while (reader->Read(&piece)) {
    std::cout << piece.text_delta() << std::flush;
    num_tokens += piece.tokens_size();
    if (piece.has_finish()) finish = piece.finish();
    if (options.cancel_after && num_tokens >= *options.cancel_after && !was_enough) {
      was_enough = true;
      context.TryCancel();
    }
  }
  // Always: it is what tells a whole answer from one that broke off.
  const grpc::Status status = reader->Finish();
  interrupt.Stop();
  std::cout << std::endl;
  if (status.ok() && finish) {
    std::cerr << "[" << inference::FinishReason_Name(finish->reason()) << "] " << finish->usage().prompt_tokens()
              << " prompt + " << finish->usage().output_tokens() << " output tokens" << std::endl;
    return 0;
  }
  if (status.error_code() == grpc::StatusCode::CANCELLED && was_enough) {
    std::cerr << "[cancelled after " << num_tokens << " tokens]" << std::endl;
    return 0;
  }
  if (interrupt.was_interrupted) return kInterrupted;
  std::cerr << "error: " << (status.ok() ? "the stream ended without a finish" : status.error_message()) << std::endl;
  return ExitCode(status.error_code());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = ParseOptions(argc, argv);
    if (options.help) {
      std::cout << kHelp << std::endl;
      return 0;
    }
    Interrupt interrupt;
    return Stream(options, interrupt);
  } catch (const UsageError& error) {
    std::cerr << "error: " << error.what() << std::endl << kHelp << std::endl;
    return kUsage;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return kFailed;
  }
}
