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

const USAGE = `usage: node client.mjs (--prompt TEXT | --chat TEXT) [--adapter NAME] [--max-tokens N] [--temperature T]
                       [--timeout-s S] [--keepalive-s S] [--json]
LORIKEET_INFERENCE (127.0.0.1:50051) is the service's address, LORIKEET_TOKEN the tenant's token.`;

function usage(message) {
  console.error(`error: ${message}\n${USAGE}`);
  process.exit(2);
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
    if ((values.prompt === undefined) === (values.chat === undefined)) {
      usage("give one of --prompt and --chat");
    }
    return values;
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
    channelOptions["grpc.keepalive_time_ms"] = Number(values["keepalive-s"]) * 1000;
    channelOptions["grpc.keepalive_permit_without_calls"] = 1;
  }
  const target = process.env.LORIKEET_INFERENCE ?? "127.0.0.1:50051";
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
      temperature: Number(values.temperature),
      max_tokens: Number(values["max-tokens"]),
    },
  };
}

async function stream(client, values) {
  const metadata = new grpc.Metadata();
  if (process.env.LORIKEET_TOKEN) {
    metadata.set("authorization", `Bearer ${process.env.LORIKEET_TOKEN}`);
  }
  const deadline = Date.now() + Number(values["timeout-s"]) * 1000;
  const call = client.Generate(request(values), metadata, { deadline });
  process.once("SIGINT", () => call.cancel());
  let finish;
  for await (const message of call) {
    process.stdout.write(values.json ? `${JSON.stringify(message)}\n` : message.text_delta);
    finish = message.finish ?? finish;
  }
  if (!values.json) {
    const { reason, usage: counts } = finish;
    process.stdout.write("\n");
    console.error(`[${reason}] ${counts.prompt_tokens} prompt + ${counts.output_tokens} output tokens`);
  }
}

const values = options();
const client = connect(values);
try {
  await stream(client, values);
} catch (error) {
  console.error(`error: ${error.details ?? error.message}`);
  process.exitCode = EXIT_BY_CODE.get(error.code) ?? 1;
} finally {
  client.close();
}
