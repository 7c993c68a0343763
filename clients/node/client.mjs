// Streams one Generate, with the protos as they are and gRPC's default message limits.
//
//   LORIKEET_TOKEN=... node client.mjs --prompt "Once upon a time" [--adapter demo/pirate] [--max-tokens 50]
//
// Text goes to stdout as it comes; with --json each message is one line instead. Exit codes are the CLI's:
// 0 done, 1 failed, 2 usage, 3 not found, 4 unavailable, 5 not allowed, 6 out of time.
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "protos");
const EXIT_BY_CODE = new Map([
  [grpc.status.NOT_FOUND, 3],
  [grpc.status.UNAVAILABLE, 4],
  [grpc.status.UNAUTHENTICATED, 5],
  [grpc.status.PERMISSION_DENIED, 5],
  [grpc.status.DEADLINE_EXCEEDED, 6],
]);

const WHOLE = /^\d+$/;
const DECIMAL = /^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const MOST_FLOAT = 3.4028234663852886e38;

const USAGE = `usage: node client.mjs (--prompt TEXT | --chat TEXT) [--adapter NAME] [--max-tokens N] [--temperature T]
                       [--timeout-s S] [--keepalive-s S] [--json]
LORIKEET_INFERENCE (127.0.0.1:50051) is the service's address, LORIKEET_TOKEN the tenant's token.`;

function usage(message) {
  console.error(`error: ${message}\n${USAGE}`);
  process.exit(2);
}

// All of `text` as a number from `least` to `most`; Number() alone would take "" for 0, and the wire wraps.
function number(values, name, pattern, least, most) {
  const text = values[name];
  if (text === undefined) return undefined;
  const value = Number(text);
  if (!pattern.test(text) || !(value >= least && value <= most)) {
    usage(`--${name}: '${text}' is not a number that it can take`);
  }
  return value;
}

function checked(values) {
  if ((values.prompt === undefined) === (values.chat === undefined)) {
    usage("give one of --prompt and --chat");
  }
  return {
    ...values,
    "max-tokens": number(values, "max-tokens", WHOLE, 0, 2 ** 32 - 1),
    temperature: number(values, "temperature", DECIMAL, 0, MOST_FLOAT),
    "timeout-s": Math.min(number(values, "timeout-s", DECIMAL, 0, Number.MAX_VALUE), 1e9),
    // Timers of Node count milliseconds in 31 bits, and fire at once beyond.
    "keepalive-s": number(values, "keepalive-s", DECIMAL, 0.001, 2 ** 31 / 1000 - 1),
  };
}

function options() {
  try {
    const { values } = parseArgs({
      options: {
        prompt: { type: "string" },
        chat: { type: "string" },
        adapter: { type: "string" },
        "max-tokens": { type: "string", default: "100" },
        temperature: { type: "string", default: "0" },
        "timeout-s": { type: "string", default: "120" },
        "keepalive-s": { type: "string" },
        json: { type: "boolean", default: false },
        help: { type: "boolean", short: "h", default: false },
      },
    });
    if (values.help) {
      console.log(USAGE);
      process.exit(0);
    }
    return checked(values);
  } catch (error) {
    return usage(error.message);
  }
}

function connect(values) {
  const definition = protoLoader.loadSync("lorikeet/inference/v1/inference_service.proto", {
    includeDirs: [PROTOS],
    // Field names as in the protos, enums by name, 64-bit numbers without loss.
    keepCase: true,
    enums: String,
    longs: String,
    oneofs: true,
    // Zeros and empty strings too, which the wire leaves out.
    defaults: true,
  });
  const { InferenceService } = grpc.loadPackageDefinition(definition).lorikeet.inference.v1;
  const channelOptions = {};
  if (values["keepalive-s"] !== undefined) {
    channelOptions["grpc.keepalive_time_ms"] = Math.round(values["keepalive-s"] * 1000);
    channelOptions["grpc.keepalive_permit_without_calls"] = 1;
  }
  const target = process.env.LORIKEET_INFERENCE || "127.0.0.1:50051";
  return new InferenceService(target, grpc.credentials.createInsecure(), channelOptions);
}

function request(values) {
  const input =
    values.prompt !== undefined
      ? { prompt: values.prompt }
      : { chat: { messages: [{ role: "user", content: values.chat }] } };
  return {
    ...input,
    ...(values.adapter !== undefined && { adapter: values.adapter }),
    sampling: {
      temperature: values.temperature,
      max_tokens: values["max-tokens"],
    },
  };
}

async function stream(client, values) {
  const metadata = new grpc.Metadata();
  const token = process.env.LORIKEET_TOKEN;
  if (token) {
    // gRPC's own error would print it.
    if (!/^[\x21-\x7e]+$/.test(token)) {
      throw new Error("LORIKEET_TOKEN has characters that a header cannot carry; copy it again without white space");
    }
    metadata.set("authorization", `Bearer ${token}`);
  }
  const deadline = Date.now() + values["timeout-s"] * 1000;
  const call = client.Generate(request(values), metadata, { deadline });
  process.once("SIGINT", () => call.cancel());
  let finish;
  for await (const message of call) {
    process.stdout.write(values.json ? `${JSON.stringify(message)}\n` : message.text_delta);
    finish = message.finish ?? finish;
  }
  if (finish === undefined || finish === null) {
    throw new Error("the stream ended without a finish");
  }
  if (!values.json) {
    const { reason, usage: counts } = finish;
    process.stdout.write("\n");
    console.error(`[${reason}] ${counts.prompt_tokens} prompt + ${counts.output_tokens} output tokens`);
  }
}

// The reader (head, less) has left.
process.stdout.on("error", (error) => {
  if (error.code !== "EPIPE") throw error;
  process.exit(1);
});
const values = options();
let client;
try {
  client = connect(values);
  await stream(client, values);
} catch (error) {
  console.error(`error: ${error.details ?? error.message}`);
  process.exitCode = EXIT_BY_CODE.get(error.code) ?? 1;
} finally {
  client?.close();
}
